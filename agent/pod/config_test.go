package pod

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"pgregory.net/rapid"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/csi/privatemounts"
	"keelson.dev/keelson/internal/virtual"
)

func TestMain(m *testing.M) { privatemounts.Main(m) }

func TestExpand(t *testing.T) {
	vars := map[string]string{"A": "1", "B": "two", "EMPTY": ""}
	lookup := func(n string) (string, bool) { v, ok := vars[n]; return v, ok }
	for in, want := range map[string]string{
		"$(A)": "1", "$(A)-$(B)": "1-two", "$$(A)": "$(A)", "$$$(A)": "$1", "$(NONE)": "$(NONE)", "$(A": "$(A", "$": "$", "$A": "$A", "a$$b": "a$b", "$(EMPTY)x": "x", "$$": "$", "$(A)$": "1$", "": "",
	} {
		if got := expand(in, lookup); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
	rapid.Check(t, func(r *rapid.T) {
		s := rapid.StringMatching(`[a$()A]{0,20}`).Draw(r, "s")
		if got := expand(s, func(string) (string, bool) { return "", false }); len(got) > len(s) {
			r.Fatalf("%q grows to %q although nothing is known", s, got)
		}
		if doubled := strings.ReplaceAll(s, "$", "$$"); expand(doubled, lookup) != s {
			r.Fatalf("%q is not what its escaped form %q becomes", s, doubled)
		}
	})
}

func envOf(t *testing.T, c *fake.Cluster, p *v1.Pod) map[string]string {
	t.Helper()
	kv, err := environ{objects: c, pod: p, allocatable: v1.ResourceList{v1.ResourceMemory: resource.MustParse("8Gi")}}.build(&p.Spec.Containers[0])
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, e := range kv {
		if _, twice := out[e.Key]; twice {
			t.Errorf("%s is set twice", e.Key)
		}
		out[e.Key] = string(e.Value)
	}
	return out
}

func TestEnvironment(t *testing.T) {
	c := fake.NewCluster()
	c.Put(
		&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "cm"}, Data: map[string]string{"K": "v", "not a name=": "x"}},
		&v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"}, Data: map[string][]byte{"P": []byte("geheim")}},
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"}, Spec: v1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []v1.ServicePort{{Name: "https", Port: 443}}}},
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "my-db"}, Spec: v1.ServiceSpec{ClusterIP: "10.96.0.9", Ports: []v1.ServicePort{{Port: 5432, Protocol: v1.ProtocolTCP}}}},
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "headless"}, Spec: v1.ServiceSpec{ClusterIP: "None", Ports: []v1.ServicePort{{Port: 1}}}},
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "far"}, Spec: v1.ServiceSpec{ClusterIP: "10.96.0.8", Ports: []v1.ServicePort{{Port: 1}}}},
	)
	yes := true
	p := simplePod("u1", v1.Container{Name: "app", Resources: v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("1500m")}, Limits: v1.ResourceList{}},
		EnvFrom: []v1.EnvFromSource{{Prefix: "CM_", ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}}},
			{SecretRef: &v1.SecretEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "absent"}, Optional: &yes}}},
		Env: []v1.EnvVar{
			{Name: "PLAIN", Value: "x"}, {Name: "REF", Value: "$(PLAIN)/$(CM_K)/$(KUBERNETES_SERVICE_HOST)/$(LATER)"}, {Name: "LATER", Value: "y"},
			{Name: "POD", ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
			{Name: "IP", ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
			{Name: "LABEL", ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.labels['a/b']"}}},
			{Name: "CPU", ValueFrom: &v1.EnvVarSource{ResourceFieldRef: &v1.ResourceFieldSelector{Resource: "requests.cpu"}}},
			{Name: "MEM", ValueFrom: &v1.EnvVarSource{ResourceFieldRef: &v1.ResourceFieldSelector{Resource: "limits.memory", Divisor: resource.MustParse("1Gi")}}},
			{Name: "SECRET", ValueFrom: &v1.EnvVarSource{SecretKeyRef: &v1.SecretKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "s"}, Key: "P"}}},
			{Name: "GONE", ValueFrom: &v1.EnvVarSource{ConfigMapKeyRef: &v1.ConfigMapKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}, Key: "none", Optional: &yes}}},
			{Name: "MY_DB_PORT", Value: "mine"},
		}})
	p.Labels, p.Status.PodIP = map[string]string{"a/b": "label"}, "10.88.0.2"
	got := envOf(t, c, p)
	for k, want := range map[string]string{"CM_K": "v", "PLAIN": "x", "REF": "x/v/10.96.0.1/$(LATER)", "POD": "web-u1", "IP": "10.88.0.2", "LABEL": "label", "CPU": "2", "MEM": "8", "SECRET": "geheim",
		"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "KUBERNETES_SERVICE_PORT_HTTPS": "443", "KUBERNETES_PORT_443_TCP_ADDR": "10.96.0.1",
		"MY_DB_SERVICE_HOST": "10.96.0.9", "MY_DB_PORT_5432_TCP": "tcp://10.96.0.9:5432", "MY_DB_PORT": "mine"} {
		if got[k] != want {
			t.Errorf("%s = %q, want %q", k, got[k], want)
		}
	}
	for _, k := range []string{"GONE", "HEADLESS_SERVICE_HOST", "FAR_SERVICE_HOST", "CM_not a name="} {
		if v, ok := got[k]; ok {
			t.Errorf("%s = %q is not to be set", k, v)
		}
	}
	no := false
	p.Spec.EnableServiceLinks = &no
	if got := envOf(t, c, p); got["MY_DB_SERVICE_HOST"] != "" || got["KUBERNETES_SERVICE_HOST"] == "" {
		t.Error("enableServiceLinks: false takes all but default/kubernetes away")
	}
	p.Spec.Containers[0].Env = []v1.EnvVar{{Name: "X", ValueFrom: &v1.EnvVarSource{SecretKeyRef: &v1.SecretKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "s"}, Key: "none"}}}}
	if _, err := (environ{objects: c, pod: p}).build(&p.Spec.Containers[0]); err == nil || err.Error() != "couldn't find key none in Secret default/s" {
		t.Errorf("a missing key: %v", err)
	}
}

// F104: requests and limits as passed to the kernel; the OOM score by QoS class.
func TestResources(t *testing.T) {
	q := func(cpu, mem string) v1.ResourceList {
		l := v1.ResourceList{}
		if cpu != "" {
			l[v1.ResourceCPU] = resource.MustParse(cpu)
		}
		if mem != "" {
			l[v1.ResourceMemory] = resource.MustParse(mem)
		}
		return l
	}
	for _, c := range []struct {
		requests, limits v1.ResourceList
		class            v1.PodQOSClass
		shares, quota    int64
		memory, score    int64
		parent           string
	}{
		{q("", ""), q("", ""), v1.PodQOSBestEffort, 2, 0, 0, 1000, "/k/kubepods/besteffort/podu1"},
		{q("500m", "1Gi"), q("500m", "1Gi"), v1.PodQOSGuaranteed, 512, 50000, 1 << 30, -997, "/k/kubepods/podu1"},
		{q("250m", "1Gi"), q("1", "2Gi"), v1.PodQOSBurstable, 256, 100000, 2 << 30, 750, "/k/kubepods/burstable/podu1"},
		{q("1m", ""), q("5m", ""), v1.PodQOSBurstable, 2, 1000, 0, 999, "/k/kubepods/burstable/podu1"},
	} {
		p := simplePod("u1", v1.Container{Name: "app", Resources: v1.ResourceRequirements{Requests: c.requests, Limits: c.limits}})
		r := containerResources(p, &p.Spec.Containers[0], 4<<30)
		if QOS(p) != c.class || r.CpuShares != c.shares || r.CpuQuota != c.quota || r.MemoryLimitInBytes != c.memory || r.OomScoreAdj != c.score || cgroupParent("k", p) != c.parent {
			t.Errorf("%v/%v: %s %v %s", c.requests, c.limits, QOS(p), r, cgroupParent("k", p))
		}
	}
	p := simplePod("u1", v1.Container{Name: "a", Resources: v1.ResourceRequirements{Limits: q("1", "1Gi")}}, v1.Container{Name: "b", Resources: v1.ResourceRequirements{Limits: q("1", "")}})
	if r := podResources(p); r.CpuQuota != 200000 || r.MemoryLimitInBytes != 0 {
		t.Errorf("a pod with one container without memory limit: %v", r)
	}
}

// With cgroup v2, a container that runs out of memory is killed as a whole, unless the node is
// configured otherwise.
func TestOOMGroup(t *testing.T) {
	p := simplePod("u1")
	for single, want := range map[bool]string{false: "1", true: ""} {
		w := &worker{cfg: &Config{Objects: fake.NewCluster(), SingleProcessOOMKill: single}}
		if got := w.containerLimits(p, &p.Spec.Containers[0]).Unified["memory.oom.group"]; got != want {
			t.Errorf("single process %v: memory.oom.group is %q, want %q", single, got, want)
		}
	}
}

func TestSecurityContext(t *testing.T) {
	i := func(n int64) *int64 { return &n }
	yes, no := true, false
	p := simplePod("u1")
	p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: i(1000), RunAsGroup: i(2000), FSGroup: i(3000), SupplementalGroups: []int64{4000}, SeccompProfile: &v1.SeccompProfile{Type: v1.SeccompProfileTypeRuntimeDefault}}
	p.Spec.Containers[0].SecurityContext = &v1.SecurityContext{RunAsUser: i(0), AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes, Capabilities: &v1.Capabilities{Add: []v1.Capability{"NET_ADMIN"}, Drop: []v1.Capability{"ALL"}}}
	s := securityContext(p, &p.Spec.Containers[0], false)
	if s.RunAsUser.Value != 0 || s.RunAsGroup.Value != 2000 || !slices.Equal(s.SupplementalGroups, []int64{4000, 3000}) || !s.NoNewPrivs || !s.ReadonlyRootfs || s.Seccomp.ProfileType != cri.SecurityProfile_RuntimeDefault ||
		s.Capabilities.AddCapabilities[0] != "NET_ADMIN" || s.Capabilities.DropCapabilities[0] != "ALL" || len(s.MaskedPaths) == 0 {
		t.Errorf("context: %v", s)
	}
	p.Spec.Containers[0].SecurityContext.Privileged = &yes
	if s := securityContext(p, &p.Spec.Containers[0], true); !s.Privileged || s.NoNewPrivs || len(s.MaskedPaths) != 0 || s.Seccomp.ProfileType != cri.SecurityProfile_Unconfined {
		t.Errorf("privileged: %v", s)
	}
	p.Spec.Containers[0].SecurityContext = nil
	p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsNonRoot: &yes}
	for user, want := range map[string]string{"": "image will run as root", "0": "image will run as root", "nobody": "non-numeric user (nobody)", "1000:1000": "", "1": ""} {
		err := verifyNonRoot(p, &p.Spec.Containers[0], user)
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("image user %q: %v", user, err)
		}
	}
	p.Spec.SecurityContext.RunAsUser = i(0)
	if err := verifyNonRoot(p, &p.Spec.Containers[0], "1000"); err == nil || !strings.Contains(err.Error(), "breaks non-root policy") {
		t.Errorf("runAsUser 0 with runAsNonRoot: %v", err)
	}
}

// The groups of a pod's volumes become supplemental groups of its containers, without duplicates.
// F38
func TestVolumeGroups(t *testing.T) {
	p, i := simplePod("u1"), func(n int64) *int64 { return &n }
	p.Spec.SecurityContext = &v1.PodSecurityContext{SupplementalGroups: []int64{4000}}
	mounts := map[string]agent.Mount{"a": {Group: i(6000)}, "b": {Group: i(5000)}, "c": {Group: i(5000)}, "d": {Group: i(4000)}, "e": {}}
	got := withVolumeGroups(securityContext(p, &p.Spec.Containers[0], false), mounts).SupplementalGroups
	if !slices.Equal(got, []int64{4000, 5000, 6000}) {
		t.Errorf("supplemental groups %v", got)
	}
}

func TestPullPolicyAndCredentials(t *testing.T) {
	for image, want := range map[string]v1.PullPolicy{"x": v1.PullAlways, "x:latest": v1.PullAlways, "x:1": v1.PullIfNotPresent, "h:5000/x": v1.PullAlways, "h:5000/x:1": v1.PullIfNotPresent, "x@sha256:1": v1.PullIfNotPresent} {
		if got := pullPolicy(&v1.Container{Image: image}); got != want {
			t.Errorf("%s: %s, want %s", image, got, want)
		}
	}
	c := fake.NewCluster()
	c.Put(&v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "login"}, Data: map[string][]byte{v1.DockerConfigJsonKey: []byte(
		`{"auths":{"https://reg.example":{"auth":"dXNlcjpwYXNz"},"reg.example/team":{"username":"team","password":"p"},"*.wild.example":{"username":"w"},"other":{"username":"o"}}}`)}})
	p := simplePod("u1")
	p.Spec.ImagePullSecrets = []v1.LocalObjectReference{{Name: "absent"}, {Name: "login"}}
	users := func(image string) (out []string) {
		for _, a := range credentials(c, p, image) {
			out = append(out, a.Username)
		}
		return out
	}
	for image, want := range map[string]string{"reg.example/x:1": "user", "reg.example/team/x:1": "team,user", "a.wild.example/x": "w", "a.b.wild.example/x": "", "busybox": ""} {
		if got := strings.Join(users(image), ","); got != want {
			t.Errorf("%s: logins %q, want %q", image, got, want)
		}
	}
}

// The complete configuration of a container: mounts, hosts file, termination message, names, and
// the sources of values.
func TestContainerConfig(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.start()
		defer func() { n.stop() }()
		p := simplePod("u1", v1.Container{Name: "app", Image: "hello:1", Command: []string{"run", "$(WHO)"}, Args: []string{"$$(WHO)"}, Env: []v1.EnvVar{{Name: "WHO", Value: "me"}},
			VolumeMounts:           []v1.VolumeMount{{Name: "cm", MountPath: "/etc/cm"}, {Name: "data", MountPath: "/data", SubPathExpr: "$(WHO)"}},
			Lifecycle:              &v1.Lifecycle{StopSignal: ptr(v1.SIGUSR1)},
			TerminationMessagePath: "/dev/termination-log", TerminationMessagePolicy: v1.TerminationMessageFallbackToLogsOnError})
		p.Spec.Volumes = []v1.Volume{{Name: "cm", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{}}}, {Name: "data", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}}
		p.Spec.Hostname, p.Spec.Subdomain = "first", "sub"
		p.Spec.HostAliases = []v1.HostAlias{{IP: "192.0.2.9", Hostnames: []string{"alias"}}}
		p.Spec.DNSConfig = &v1.PodDNSConfig{Nameservers: []string{"192.0.2.53"}, Options: []v1.PodDNSConfigOption{{Name: "edns0"}}}
		n.cluster.Put(p)
		n.is("u1", running)
		c := n.rt.ContainerConfig(n.rt.Running("u1", "app"))
		if !slices.Equal(c.Command, []string{"run", "me"}) || !slices.Equal(c.Args, []string{"$(WHO)"}) || c.LogPath != "app/0.log" || c.StopSignal != cri.Signal_SIGNAL_SIGUSR1 {
			t.Errorf("command %q %q, log %s, stop signal %v", c.Command, c.Args, c.LogPath, c.StopSignal)
		}
		mount := map[string]*cri.Mount{}
		for _, m := range c.Mounts {
			mount[m.ContainerPath] = m
		}
		if m := mount["/etc/cm"]; m == nil || !m.Readonly || m.HostPath != "/fake/volumes/u1/cm" {
			t.Errorf("/etc/cm: %v", m)
		}
		if m := mount["/data"]; m == nil || m.Readonly || !strings.HasSuffix(m.HostPath, "/pods/u1/subpaths/app/1") {
			t.Errorf("/data: %v", m)
		}
		hosts, err := os.ReadFile(mount["/etc/hosts"].HostPath)
		if err != nil || !strings.Contains(string(hosts), "10.88.0.2\tfirst.sub.default.svc.cluster.local\tfirst\n") || !strings.Contains(string(hosts), "192.0.2.9\talias\n") {
			t.Errorf("hosts: %s, %v", hosts, err)
		}
		sb := n.rt.SandboxConfig("u1")
		if sb.Hostname != "first" || sb.DnsConfig.Servers[0] != "192.0.2.53" || sb.DnsConfig.Options[0] != "edns0" || sb.Linux.CgroupParent != "/keelson/kubepods/besteffort/podu1" {
			t.Errorf("sandbox: %v", sb)
		}
		// The termination message comes from the file. A failed instance without one gets its
		// message from the log.
		if err := os.WriteFile(mount["/dev/termination-log"].HostPath, []byte("good-bye"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := n.rt.Exit("u1", "app", 0, ""); err != nil {
			t.Fatal(err)
		}
		virtual.Wait()
		if m := n.pod("u1").Status.ContainerStatuses[0].LastTerminationState.Terminated; m == nil || m.Message != "good-bye" || m.Reason != "Completed" {
			t.Errorf("last state: %+v", m)
		}
		log := filepath.Join(n.cfg.Paths.Logs, "default_web-u1_u1", "app", "1.log")
		if err := os.MkdirAll(filepath.Dir(log), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(log, []byte("2026-01-01T00:00:00.000000000Z stdout F one\n2026-01-01T00:00:00.000000000Z stderr P tw\n2026-01-01T00:00:00.000000000Z stderr F o\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := n.rt.Exit("u1", "app", 137, "OOMKilled"); err != nil {
			t.Fatal(err)
		}
		virtual.Wait()
		if m := n.pod("u1").Status.ContainerStatuses[0].LastTerminationState.Terminated; m == nil || m.Message != "one\ntwo\n" || m.Reason != "OOMKilled" {
			t.Errorf("last state from the log: %+v", m)
		}
	})
}

func TestDNS(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte("# c\nnameserver 192.0.2.1\nsearch example.com.\noptions timeout:1 ndots:2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var servers []string
	cluster := fake.NewCluster()
	w := &worker{cfg: &Config{Objects: cluster, ResolvConf: file, ClusterDNS: func() []string { return servers }},
		events: &recorder{reporter: cluster, node: "w1", now: time.Now, seen: map[string]*v1.Event{}}}
	text := func(p *v1.Pod) string {
		c, err := w.dns(p)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(c.Servers, ",") + "|" + strings.Join(c.Searches, ",") + "|" + strings.Join(c.Options, ",")
	}
	p := simplePod("u1")
	host := "192.0.2.1|example.com|timeout:1,ndots:2"
	if got := text(p); got != host {
		t.Errorf("ClusterFirst without a cluster DNS: %s", got)
	}
	servers = []string{"10.96.0.10"}
	if got := text(p); got != "10.96.0.10|default.svc.cluster.local,svc.cluster.local,cluster.local,example.com|ndots:5" {
		t.Errorf("ClusterFirst: %s", got)
	}
	p.Spec.HostNetwork = true
	if got := text(p); got != host {
		t.Errorf("ClusterFirst on the host's network: %s", got)
	}
	v := "3"
	p.Spec.DNSPolicy, p.Spec.DNSConfig = v1.DNSNone, &v1.PodDNSConfig{Nameservers: []string{"192.0.2.7"}, Searches: []string{"a"}, Options: []v1.PodDNSConfigOption{{Name: "ndots", Value: &v}}}
	if got := text(p); got != "192.0.2.7|a|ndots:3" {
		t.Errorf("None: %s", got)
	}
	p = simplePod("u2")
	p.Spec.HostNetwork, p.Spec.DNSPolicy = true, v1.DNSClusterFirstWithHostNet
	if got := text(p); got != "10.96.0.10|default.svc.cluster.local,svc.cluster.local,cluster.local,example.com|ndots:5" {
		t.Errorf("ClusterFirstWithHostNet: %s", got)
	}
	p.Spec.HostNetwork, p.Spec.DNSPolicy = false, v1.DNSDefault
	if got := text(p); got != host {
		t.Errorf("Default: %s", got)
	}
}

// A pod with its own network does not get resolvers at the node's loopback, such as
// systemd-resolved. It gets their upstream servers, or an event that none exists.
func TestResolversOfTheNodesLoopback(t *testing.T) {
	dir := t.TempDir()
	node, resolved := filepath.Join(dir, "node"), filepath.Join(dir, "resolved")
	for name, test := range map[string]struct {
		node, resolved string
		own, on        string // for a pod with its own network, and for one on the host network
		told           string
	}{
		"systemd-resolved": {"nameserver 127.0.0.53\noptions edns0\nsearch a.example\n", "nameserver 192.0.2.1\nnameserver 192.0.2.2\nsearch a.example\n",
			"192.0.2.1 192.0.2.2", "127.0.0.53", ""},
		"it knows none itself":    {"nameserver 127.0.0.53\n", "search .\n", "", "127.0.0.53", "in force is: none"},
		"another one":             {"nameserver ::1\n", "", "", "::1", "in force is: none"},
		"one is beyond":           {"nameserver 127.0.0.1\nnameserver 192.0.2.9\n", "nameserver 192.0.2.1\n", "192.0.2.9", "127.0.0.1 192.0.2.9", "in force is: 192.0.2.9"},
		"none is at the loopback": {"nameserver 192.0.2.9\n", "nameserver 192.0.2.1\n", "192.0.2.9", "192.0.2.9", ""},
		"none at all":             {"", "nameserver 192.0.2.1\n", "", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			for file, text := range map[string]string{node: test.node, resolved: test.resolved} {
				if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			cluster := fake.NewCluster()
			events := &recorder{reporter: cluster, node: "w1", now: time.Now, seen: map[string]*v1.Event{}}
			w := &worker{cfg: &Config{Objects: cluster, ResolvConf: node, ResolvedConf: resolved}, events: events}
			servers := func(on bool) string {
				p := simplePod("u1")
				p.Spec.DNSPolicy, p.Spec.HostNetwork = v1.DNSDefault, on
				c, err := w.dns(p)
				if err != nil {
					t.Fatal(err)
				}
				return strings.Join(c.Servers, " ")
			}
			if got := servers(true); got != test.on {
				t.Errorf("on the node's network: %q", got)
			}
			if len(events.seen) > 0 {
				t.Errorf("a pod on the node's network is told: %v", events.seen)
			}
			if got := servers(false); got != test.own {
				t.Errorf("on a network of its own: %q", got)
			}
			var told string
			for _, e := range events.seen {
				told += e.Message
			}
			if (told == "") != (test.told == "") || !strings.Contains(told, test.told) {
				t.Errorf("told: %q", told)
			}
		})
	}
}

// A subPath is mounted only from inside its volume, and a bind mount does not change afterwards.
func TestSubPaths(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	dir := t.TempDir()
	vol, target := filepath.Join(dir, "vol"), filepath.Join(dir, "target")
	write := func(path, text string) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(dir, "secret"), "outside")
	write(filepath.Join(vol, "..v1/key"), "inside")
	for link, to := range map[string]string{"..data": "..v1", "key": "..data/key", "evil": "../secret", "absolute": filepath.Join(dir, "secret")} {
		if err := os.Symlink(to, filepath.Join(vol, link)); err != nil {
			t.Fatal(err)
		}
	}
	var b BindSubPaths
	defer func() {
		if err := b.Release(dir); err != nil {
			t.Error(err)
		}
	}()
	for range 2 {
		src, err := b.Bind(t.Context(), filepath.Join(target, "0"), vol, "key")
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(src); err != nil || string(got) != "inside" {
			t.Errorf("key: %q, %v", got, err)
		}
	}
	for _, sub := range []string{"evil", "absolute", "../secret", "/etc"} {
		if src, err := b.Bind(t.Context(), filepath.Join(target, "1"), vol, sub); err == nil {
			t.Errorf("subPath %q was bound to %s", sub, src)
		}
	}
	src, err := b.Bind(t.Context(), filepath.Join(target, "2"), vol, "made/on/demand")
	if err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(vol, "made/on/demand/f"), "x")
	// The pod replaces the directory with a symlink to the outside: the mount does not follow it.
	if err := os.Rename(filepath.Join(vol, "made"), filepath.Join(vol, "moved")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, filepath.Join(vol, "made")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(src, "f")); err != nil {
		t.Errorf("the bound folder changed: %v", err)
	}
	for range 2 {
		if err := b.Release(target); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := mountPoints(target); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

var _ agent.Prober = prober{}

// Entries of resolv.conf beyond a resolver's limits are dropped and reported in an event. The pod's
// options replace options of the same name.
func TestDNSLimits(t *testing.T) {
	p := simplePod("u1")
	two := "2"
	p.Spec.DNSConfig = &v1.PodDNSConfig{Nameservers: []string{"192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.3"},
		Options: []v1.PodDNSConfigOption{{Name: "ndots", Value: &two}, {Name: "edns0"}}}
	for i := range 40 {
		p.Spec.DNSConfig.Searches = append(p.Spec.DNSConfig.Searches, fmt.Sprintf("d%d.example", i))
	}
	c, told := resolvers(p, "search node.example\noptions rotate\noptions timeout:1\n", []string{"10.96.0.10"}, "cluster.local")
	if len(c.Servers) != 3 || c.Servers[2] != "192.0.2.2" || len(c.Searches) != 32 || c.Searches[3] != "node.example" || strings.Join(c.Options, " ") != "ndots:2 edns0" {
		t.Errorf("%v", c)
	}
	if len(told) != 2 || told[0].reason != "DNSConfigForming" || !strings.HasSuffix(told[0].message, "10.96.0.10 192.0.2.1 192.0.2.2") {
		t.Errorf("told: %v", told)
	}
	p.Spec.DNSConfig.Searches = []string{strings.Repeat("a.", 600), strings.Repeat("b.", 600)}
	if c, told := resolvers(p, "", []string{"10.96.0.10"}, "cluster.local"); len(c.Searches) != 4 || len(told) != 2 {
		t.Errorf("long domains: %d, %v", len(c.Searches), told)
	}
	p.Spec.DNSConfig = nil
	if c, told := resolvers(p, "nameserver 192.0.2.9\noptions rotate\noptions timeout:1\n", nil, "cluster.local"); len(told) != 1 || told[0].reason != "MissingClusterDNS" || strings.Join(c.Options, " ") != "rotate timeout:1" {
		t.Errorf("a cluster without DNS: %v %v", c, told)
	}
}

// All containers of a pod share its pseudoterminals, and each can allocate some. F105
func TestTerminalsOfAPod(t *testing.T) {
	for containers, want := range map[int]int{1: 256, 4: 64, 16: 16, 40: 16} {
		p := simplePod("u1")
		p.Spec.Containers = make([]v1.Container, containers-1)
		p.Spec.InitContainers = make([]v1.Container, 1)
		if got := terminals(p); got != want {
			t.Errorf("%d containers: %d terminals each, want %d", containers, got, want)
		}
	}
}
