package features

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"keelson.dev/keelson/agent/node"
	"keelson.dev/keelson/controlplane/server/command"
)

// defaultSetting is a default of Keelson that differs from the one of Kubernetes.
type defaultSetting struct {
	upstream   string // component and setting in Kubernetes
	kubernetes string // default in Kubernetes
	keelson    string // default in Keelson, as in the flag or its help
	means      string // explanation of the default for the table
	program    string // program of the flag: run, init or agent; "" = no flag
	flag       string
	restore    string // flag value that restores Kubernetes' default; "" = none
	by         string // other way to restore Kubernetes' default
	source     string // FILE: TEXT with the default, if it has no flag; "" = unknown
}

const (
	apiserver = "kube-apiserver"
	manager   = "kube-controller-manager"
	kubelet   = "kubelet"
	kubeProxy = "kube-proxy"
	scheduler = "kube-scheduler"
)

// differences are the defaults that differ from Kubernetes, in the order of the table.
var differences = []defaultSetting{
	{upstream: apiserver + " `--default-unreachable-toleration-seconds`, `--default-not-ready-toleration-seconds`",
		kubernetes: "300", keelson: "15",
		means: " seconds until pods leave a lost node. This is safe, because a lost node ends pods with attached " +
			"volumes by itself (`--fence-after`)",
		program: "run", flag: "eviction-seconds", restore: "300"},
	{upstream: manager + " `--node-monitor-grace-period`", kubernetes: "50s", keelson: "9s",
		means:  " (4s without a heartbeat, then 5s for a new session), up to twice that in large clusters",
		source: "controlplane/nodegateway/server.go: {&t.Suspect, 4 * time.Second}, {&t.Grace, 5 * time.Second}"},
	{upstream: manager + " time until volumes of a lost node are detached by force", kubernetes: "6m", keelson: "20s",
		means: ", then the node has ended the pods, and 5s more", program: "agent", flag: "fence-after", restore: "6m"},
	{upstream: apiserver + " `--authorization-mode`", kubernetes: "AlwaysAllow", keelson: "Node,RBAC", program: "run",
		flag: "authorization-mode", restore: "AlwaysAllow"},
	{upstream: apiserver + " `--shutdown-delay-duration`", kubernetes: "0s", keelson: "2s", program: "run",
		flag: "shutdown-delay-duration", restore: "0s"},
	{upstream: apiserver + " `--audit-policy-file`", kubernetes: "none: nothing is recorded",
		keelson: "every request that changes something or is refused, without bodies",
		program: "run", flag: "audit-policy-file",
		by: "run `--audit-policy-file` with a file whose only rule is `level: None`"},
	{upstream: apiserver + " `--audit-log-mode`", kubernetes: "blocking", keelson: "batch",
		means:   "; `blocking-strict` also waits, and refuses what cannot be recorded",
		program: "run", flag: "audit-log-mode"},
	{upstream: apiserver + " `--audit-log-maxage`", kubernetes: "0", keelson: "30", program: "run",
		flag: "audit-log-maxage", restore: "0"},
	{upstream: apiserver + " `--audit-log-maxbackup`", kubernetes: "0", keelson: "5", program: "run",
		flag: "audit-log-maxbackup", restore: "0"},
	{upstream: apiserver + " `--service-cluster-ip-range`", kubernetes: "10.0.0.0/24", keelson: "10.96.0.0/16",
		program: "init", flag: "service-cidr", restore: "10.0.0.0/24"},
	{upstream: manager + " `--cluster-cidr`", kubernetes: "none", keelson: "10.244.0.0/16",
		means: "; nodes always get their ranges from it", program: "init", flag: "cluster-cidr"},
	{upstream: manager + " mirror pods as endpoints of Services", kubernetes: "true", keelson: "false",
		means:   ", nor peers of network policies",
		program: "run", flag: "mirror-pod-peers", by: "run `--mirror-pod-peers=true`"},
	{upstream: "etcd `--quota-backend-bytes`", kubernetes: "2Gi", keelson: "8Gi", program: "run", flag: "store-quota",
		restore: "2Gi"},
	{upstream: kubelet + " `podPidsLimit`", kubernetes: "-1", keelson: "4096", program: "agent", flag: "pod-max-pids",
		restore: "-1"},
	{upstream: kubelet + " `evictionHard` for `imagefs.available`", kubernetes: "15%", keelson: "10%",
		means:   ", as for `nodefs.available`: images have no disk of their own",
		program: "agent", flag: "disk-pressure-below", restore: "15%"},
	{upstream: kubelet + " delay between restarts of a container", kubernetes: "10s to 5m", keelson: "1s to 1m",
		means:  " (the first restart at once)",
		by:     "annotation `keelson.dev/max-restart-delay: 5m` of a pod, for the longest delay",
		source: "agent/pod/lifecycle/policy.go: RestartMin   = time.Second\n\tRestartMax   = time.Minute"},
	{upstream: kubelet + " delay between attempts to pull an image", kubernetes: "10s to 5m", keelson: "2s to 2m",
		source: "agent/pod/lifecycle/policy.go: ImageMin     = 2 * time.Second\n\tImageMax     = 2 * time.Minute"},
	{upstream: kubelet + " `failCgroupV1`", kubernetes: "true", keelson: "false",
		means:  ": agents run with cgroup v1 too",
		source: "agent/node/config.go: (with cgroup v1 it is always one)"},
	{upstream: kubelet + " `healthzPort`, " + kubeProxy + " `--metrics-bind-address`", kubernetes: "10248, 10249",
		keelson: "10250",
		means:   ": `/healthz` and `/metrics` of the agent", program: "agent", flag: "kubelet-port"},
	{upstream: scheduler + " `podInitialBackoffSeconds`", kubernetes: "1s", keelson: "0.1s",
		by:     "run `--scheduler-config` with a file that has `podInitialBackoffSeconds: 1`",
		source: "controlplane/scheduler/queue.go: minBackoff     = 100 * time.Millisecond"},
	{upstream: apiserver + " `--tls-min-version`", kubernetes: "VersionTLS12", keelson: "VersionTLS13",
		source: "controlplane/pki/transport.go: MinVersion:     tls.VersionTLS13,"},
	{upstream: apiserver + " `--http2-max-streams-per-connection`", kubernetes: "100", keelson: "250",
		source: "controlplane/apiserver/server.go: MaxConcurrentStreams: 250"},
	{upstream: apiserver + " `--service-account-extend-token-expiration`", kubernetes: "true", keelson: "false",
		means:  ": a pod's token is valid for the 3607 seconds that its volume asks for; the node renews it in time",
		source: "controlplane/apiserver/admission/builtin/serviceaccount.go: tokenSeconds = 3607"},
	{upstream: apiserver + " `--enable-priority-and-fairness`", kubernetes: "true", keelson: "false",
		means: ": `--max-requests-inflight` and `--max-mutating-requests-inflight` bound all requests, and memory " +
			"bounds those of one user",
		source: "controlplane/apiserver/flowcontrol/flow.go: Read: 400, Write: 200"},
	{upstream: apiserver + " `--allow-privileged`", kubernetes: "false", keelson: "true",
		by: "the label `pod-security.kubernetes.io/enforce: baseline` of namespaces, or agent " +
			"`--pod-security baseline`",
		source: "agent/node/config.go: (default privileged)"},
	{upstream: apiserver + " `--encryption-provider-config`", kubernetes: "none: the store is in clear",
		keelson: "a new one in pki of the data directory",
		means:   ": the store is encrypted with this key", program: "init", flag: "encryption-keys", restore: "none"},
	{upstream: "etcd `--election-timeout`", kubernetes: "1000 ms", keelson: "600ms", program: "run",
		flag: "heartbeat-timeout", restore: "1s"},
	{upstream: manager + " `--legacy-service-account-token-clean-up-period`", kubernetes: "8760h",
		keelson: "never: tokens in Secrets stay",
		source:  "test/features/absent.txt: The cleaner of service account tokens in Secrets"},
	{upstream: kubelet + " `failSwapOn`", kubernetes: "true", keelson: "false", program: "agent", flag: "fail-swap-on",
		by: "agent `--fail-swap-on=true`"},
	{upstream: kubelet + " `memorySwap.swapBehavior`", kubernetes: "NoSwap",
		keelson: "containers with a memory limit do not swap, others may",
		by:      "no setting: turn the machine's swap off",
		source:  "agent/oci/containerspec/spec.go: swap := res.MemoryLimitInBytes"},
	{upstream: kubelet + " `serializeImagePulls`", kubernetes: "true", keelson: "false",
		means:  ": images are pulled side by side, three layers of each at a time",
		by:     "no setting: one slow registry would hold up the pods of all others",
		source: "agent/image/layers.go: const parallelLayers = 3"},
	{upstream: kubelet + " `registryPullQPS`, `registryBurst`", kubernetes: "5, 10", keelson: "no limit",
		means: "; containers that want one image share one pull",
		by:    "no setting: pods of a node start at once", source: "agent/image/pull.go: done := s.pulls.DoChan(key"},
	{upstream: kubelet + " `imagePullCredentialsVerificationPolicy`", kubernetes: "NeverVerifyPreloadedImages",
		keelson: "NeverVerify",
		by:      "a MutatingAdmissionPolicy that sets `imagePullPolicy: Always`",
		source: "controlplane/apiserver/admission/builtin/plugins.go: use a MutatingAdmissionPolicy that sets \" +\n" +
			"\t\t\"spec.containers[].imagePullPolicy to Always"},
	{upstream: kubelet + " `eventRecordQPS`, `eventBurst`", kubernetes: "50, 100", keelson: "no limit of a node",
		means:  "; of a pod 25 at once and one more every 5 minutes, as in Kubernetes",
		by:     "no setting: the limit of each pod bounds them",
		source: "agent/pod/podevents/recorder.go: Burst       = 25\n\teventRefill = 5 * time.Minute"},
	{upstream: kubelet + " `streamingConnectionIdleTimeout`", kubernetes: "4h", keelson: "none",
		by:     "no setting: keepalives end the sessions of clients and nodes that are gone",
		source: "controlplane/apiserver/stream/exec.go: const openStreamsTimeout = 30 * time.Second"},
	{upstream: kubelet + " `enableDebuggingHandlers`, `enableSystemLogHandler`, `enableProfilingHandler`, " +
		"`enableDebugFlagsHandler`", kubernetes: "true", keelson: "false",
		means: ": port 10250 serves health, metrics, statistics, the configuration, the list of pods and the " +
			"agent's own log",
		by:     "no setting: `kubectl exec`, `logs` and `port-forward` go through the agent's own connection",
		source: "agent/kubelet/kubelet.go: case \"/pods\", \"/pods/\", \"/runningpods\", \"/runningpods/\":"},
	{upstream: kubelet + " `authorization.webhook.cacheAuthorizedTTL`", kubernetes: "5m", keelson: "2m",
		source: "agent/kubelet/who.go: allowedFor = 2 * time.Minute"},
	{upstream: kubelet + " `rotateCertificates`, `serverTLSBootstrap`", kubernetes: "false", keelson: "true",
		by:     "no setting: a node without a valid certificate is lost",
		source: "agent/session/identity.go: leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 3 * 2)"},
	{upstream: kubelet + " `nodeLeaseDurationSeconds`", kubernetes: "40", keelson: "none",
		means:  ": the node's session is its heartbeat (`--node-monitor-grace-period`)",
		by:     "no setting: no other component waits for the Lease",
		source: "controlplane/nodegateway/session/record.go: coordinationv1.LeaseSpec{HolderIdentity: &node}"},
	{upstream: kubelet + " `clusterDomain`", kubernetes: "none", keelson: "cluster.local", program: "init",
		flag: "cluster-domain"},
	{upstream: kubelet + " `clusterDNS`", kubernetes: "none", keelson: "the address of Service kube-system/kube-dns",
		means: ", where there is one", program: "agent", flag: "cluster-dns"},
	{upstream: kubelet + " `cgroupRoot`", kubernetes: "/", keelson: "/keelson", program: "agent", flag: "cgroup-root"},
	{upstream: kubelet + " `maxOpenFiles`", kubernetes: "1000000", keelson: "1048576",
		by:     "`LimitNOFILE=1000000` in the unit of the agent",
		source: "deploy/install/keelson-agent.service: LimitNOFILE=1048576"},
	{upstream: scheduler + " `parallelism`", kubernetes: "16", keelson: "1",
		means:  ": nodes are filtered one after the other",
		source: "controlplane/scheduler/config/config.go: nodes are filtered sequentially"},
	{upstream: scheduler + " DynamicResources `filterTimeout`", kubernetes: "10s", keelson: "2s",
		means:  ", and 10s at most",
		by:     "run `--scheduler-config` with a file that has `filterTimeout: 10s` in the DynamicResourcesArgs",
		source: "controlplane/scheduler/plugins/dynamicresources/dynamicresources.go: DefaultSearch = 2 * time.Second"},
	{upstream: kubeProxy + " `conntrack.tcpEstablishedTimeout`, `conntrack.tcpCloseWaitTimeout`, " +
		"`conntrack.maxPerCore`, `conntrack.min`", kubernetes: "24h, 1h, 32768, 131072",
		keelson: "those of the kernel", by: "the sysctls `net.netfilter.nf_conntrack_tcp_timeout_established=86400`, " +
			"`net.netfilter.nf_conntrack_tcp_timeout_close_wait=3600` and `net.netfilter.nf_conntrack_max`"},
	{upstream: kubeProxy + " `--proxy-mode`", kubernetes: "iptables", keelson: "nftables", program: "agent",
		flag: "proxy-mode", restore: "iptables"},
	{upstream: kubeProxy + " `--nodeport-addresses`", kubernetes: "all addresses", keelson: "all but loopback",
		program: "agent", flag: "nodeport-addresses"},
}

// checkSource fails the test if source, FILE: TEXT, no longer contains a default.
func checkSource(t *testing.T, upstream, source, value string) {
	t.Helper()
	if source == "" {
		return
	}
	file, text, _ := strings.Cut(source, ": ")
	raw, err := os.ReadFile(filepath.Join(root, file))
	if err != nil || !bytes.Contains(raw, []byte(text)) {
		t.Errorf("%s: %s does not contain the default %s (%v)", upstream, file, value, err)
	}
}

// lookupFlag returns the default, the help and a setter of a flag.
func lookupFlag(t *testing.T, program, name string) (value, help string, set func(string) error) {
	t.Helper()
	if program == "agent" {
		fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		node.Flags(fs)
		if f := fs.Lookup(name); f != nil {
			return f.DefValue, f.Usage, f.Value.Set
		}
	} else if c, _, err := command.New("test").Find([]string{program}); err == nil {
		if f := c.Flags().Lookup(name); f != nil {
			return f.DefValue, f.Usage, f.Value.Set
		}
	}
	t.Errorf("%s has no flag --%s", program, name)
	return "", "", nil
}

// Each row of the table of defaults names a flag that exists, has the default of the row, and takes
// the value that restores the default of Kubernetes.
func TestDefaultsThatDiffer(t *testing.T) {
	for _, s := range differences {
		if s.flag == "" {
			checkSource(t, s.upstream, s.source, s.keelson)
			continue
		}
		value, help, set := lookupFlag(t, s.program, s.flag)
		if set == nil {
			continue
		}
		if value != s.keelson && !strings.Contains(help, "default: "+s.keelson) &&
			!strings.Contains(help, "default "+s.keelson) {
			t.Errorf("--%s: default %q, help %q: want default %q", s.flag, value, help, s.keelson)
		}
		if s.restore == "" {
			continue
		}
		if err := set(s.restore); err != nil {
			t.Errorf("--%s=%s is not accepted: %v", s.flag, s.restore, err)
		}
	}
}

// upstreamDefaults are the defaults of the flags of Kubernetes 1.37 whose names Keelson's flags
// have too.
var upstreamDefaults = map[string]string{
	"anonymous-auth": "true", "audit-log-maxage": "0", "audit-log-maxbackup": "0", "audit-log-maxsize": "100",
	"audit-log-mode": "blocking", "audit-log-path": "",
	"audit-policy-file": "none", "admission-control-config-file": "", "authentication-config": "",
	"authentication-token-webhook-cache-ttl":   "2m0s",
	"authentication-token-webhook-config-file": "", "authentication-token-webhook-version": "v1beta1",
	"authorization-config": "", "authorization-mode": "AlwaysAllow",
	"authorization-policy-file": "", "authorization-webhook-cache-authorized-ttl": "5m0s",
	"authorization-webhook-cache-unauthorized-ttl": "30s",
	"authorization-webhook-config-file":            "", "authorization-webhook-version": "v1beta1",
	"disable-admission-plugins": "[]", "enable-admission-plugins": "[]",
	"enable-bootstrap-token-auth": "false", "oidc-ca-file": "", "oidc-client-id": "", "oidc-groups-claim": "",
	"oidc-groups-prefix": "", "oidc-issuer-url": "",
	"oidc-required-claim": "[]", "oidc-signing-algs": "[RS256]", "oidc-username-claim": "sub",
	"oidc-username-prefix": "", "requestheader-allowed-names": "[]",
	"requestheader-client-ca-file": "", "requestheader-extra-headers-prefix": "[]", "requestheader-group-headers": "[]",
	"requestheader-uid-headers":      "[]",
	"requestheader-username-headers": "[]", "shutdown-delay-duration": "0s", "token-auth-file": "",
	"max-pods": "110", "pod-max-pids": "-1", "seccomp-default": "false", "fail-swap-on": "true",
	"resolv-conf": "/etc/resolv.conf", "proxy-mode": "iptables", "nodeport-addresses": "",
}

// A flag with the name of a Kubernetes flag has the default of Kubernetes, or is in the table.
func TestFlagsOfTheSameNameHaveTheSameDefault(t *testing.T) {
	compare := func(name, value string) {
		want, same := upstreamDefaults[name]
		told := slices.ContainsFunc(differences, func(s defaultSetting) bool { return s.flag == name })
		if same && value != want && !told {
			t.Errorf("--%s: default %q, and %q in Kubernetes: the table of defaults must name it", name, value, want)
		}
	}
	run, _, err := command.New("test").Find([]string{"run"})
	if err != nil {
		t.Fatal(err)
	}
	run.Flags().VisitAll(func(f *pflag.Flag) { compare(f.Name, f.DefValue) })
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	node.Flags(fs)
	fs.VisitAll(func(f *pflag.Flag) { compare(f.Name, f.DefValue) })
}

// writeDifferences writes the table of defaults.
func writeDifferences(b *bytes.Buffer) {
	b.WriteString(`
## Defaults that differ from Kubernetes

These settings have a default that differs from that of Kubernetes 1.37. A flag with the name of a Kubernetes flag that is not in this table has the default
of Kubernetes. *run* and *init* are commands of ` + "`keelson-controlplane`" + `, *agent* is ` + "`keelson-agent`" +
		`. Each flag is also a key of the program's
[configuration file](configuration.md). Set a flag of *run* to the same value on every replica. ` +
		"`--eviction-seconds`" + ` applies to pods that are created
afterwards. A pod's own tolerations of ` + "`node.kubernetes.io/not-ready` and `node.kubernetes.io/unreachable`" +
		` have precedence.

| setting of Kubernetes | its default | Keelson's default | restores the default of Kubernetes |
|---|---|---|---|
`)
	for _, s := range differences {
		restore := "no setting"
		switch {
		case s.by != "":
			restore = s.by
		case s.restore != "":
			restore = fmt.Sprintf("%s `--%s %s`", s.program, s.flag, s.restore)
		case s.flag != "":
			restore = fmt.Sprintf("no value of %s `--%s`", s.program, s.flag)
		}
		fmt.Fprintf(b, "| %s | %s | %s%s | %s |\n", s.upstream, s.kubernetes, s.keelson, s.means, restore)
	}
}
