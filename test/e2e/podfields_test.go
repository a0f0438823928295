package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/test/testenv"
)

// podFieldCase is a pod with one special field and the effect of the field. The program's output
// must match want. If the effect is not visible inside the pod, until checks the pod.
type podFieldCase struct {
	name, spec, main, run, want string
	until                       func(*v1.Pod) error
	// deadlineAfter is the output of the program after which the pod gets a deadline of a second:
	// the program may start much later than the pod.
	deadlineAfter string
}

const vol = "volumes: [{name: v, emptyDir: {}}]"

func podFieldCases() []podFieldCase {
	return slices.Concat(podFieldsOfNamespaces(), podFieldsOfContainers(), podFieldsOfResources())
}

// podFieldsOfNamespaces are the cases of names, namespaces and users of a pod.
func podFieldsOfNamespaces() []podFieldCase {
	return []podFieldCase{
		{name: "fqdn", spec: "hostname: db, subdomain: s, setHostnameAsFQDN: true", run: "hostname; cat /etc/hosts",
			want: `^db\.s\.NS\.svc\.\S+\n(?s:.*)\tdb\.s\.NS\.svc\.\S+\tdb\n`},
		{name: "override", spec: "hostname: db, subdomain: s, hostnameOverride: my.host",
			run: "hostname; cat /etc/hosts", want: `^my\.host\n(?s:.*)\tmy\.host\n`},
		{name: "aliases", spec: "hostAliases: [{ip: 192.0.2.7, hostnames: [a, b]}]", run: "cat /etc/hosts",
			want: `192\.0\.2\.7\ta\tb\n`},
		{name: "resolver", spec: "dnsPolicy: None, dnsConfig: {nameservers: [192.0.2.53], searches: [x.test], " +
			"options: [{name: ndots, value: '2'}]}", run: "sort /etc/resolv.conf",
			want: `^nameserver 192\.0\.2\.53\noptions ndots:2\nsearch x\.test\n$`},
		{name: "pid-own", run: "cat /proc/1/comm", want: `^(sh|cat|busybox)\n`},
		{name: "pid-shared", spec: "shareProcessNamespace: true", run: "cat /proc/1/comm", want: `pause`},
		{name: "pid-host", spec: "hostPID: true", run: "ls -d /proc/[0-9]* 2>/dev/null | wc -l",
			want: `^[1-9][0-9]+\n`},
		{name: "host-network", spec: "hostNetwork: true",
			run: "ls /sys/class/net; cat /proc/net/route >/dev/null; hostname", want: `\nw[0-9]+\n`},
		{name: "user", spec: "securityContext: {runAsUser: 1000, runAsGroup: 2000, supplementalGroups: [3000], " +
			"fsGroup: 4000}, " + vol, main: "volumeMounts: [{name: v, mountPath: /v}]", run: "id; stat -c %g /v",
			want: `uid=1000\S* gid=2000\S* groups=2000\S*,3000,4000\n4000\n`},
		{name: "container-user", spec: "securityContext: {runAsUser: 1000}",
			main: "securityContext: {runAsUser: 1001, runAsGroup: 2001}", run: "id -u; id -g", want: `^1001\n2001\n`},
	}
}

// podFieldsOfContainers are the cases of security contexts, files, restarts and scheduling.
func podFieldsOfContainers() []podFieldCase {
	return []podFieldCase{
		{name: "read-only", main: "securityContext: {readOnlyRootFilesystem: true}", run: "touch /x 2>&1 || true",
			want: `Read-only file system`},
		{name: "capabilities", main: "securityContext: {capabilities: {drop: [ALL], add: [NET_BIND_SERVICE]}}",
			run: "grep CapEff /proc/self/status", want: `0000000000000400\n`},
		{name: "no-new-privileges", main: "securityContext: {allowPrivilegeEscalation: false}",
			run: "grep NoNewPrivs /proc/self/status", want: `\t1\n`},
		{name: "seccomp", main: "securityContext: {seccompProfile: {type: RuntimeDefault}}",
			run: "grep Seccomp: /proc/self/status", want: `\t2\n`},
		{name: "no-seccomp", main: "securityContext: {seccompProfile: {type: Unconfined}}",
			run: "grep Seccomp: /proc/self/status", want: `\t0\n`},
		{name: "masked", run: "wc -c </proc/keys; cat /proc/timer_list 2>/dev/null | wc -c", want: `^0\n0\n`},
		{name: "sysctl", spec: "securityContext: {sysctls: [{name: net.ipv4.ip_unprivileged_port_start, value: '81'}]}",
			run: "cat /proc/sys/net/ipv4/ip_unprivileged_port_start", want: `^81\n`},
		{name: "environment",
			main: `resources: {requests: {memory: 8Mi, cpu: 10m}, limits: {memory: 32Mi}}, envFrom: [{prefix: C_, configMapRef: {name: c}}, {secretRef: {name: none, optional: true}}],
			env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: k}}}, {name: B, value: "$(A)-$$(A)-$(NONE)"}, {name: M, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Mi}}},
			{name: U, valueFrom: {resourceFieldRef: {resource: requests.cpu, divisor: 1m}}}, {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}, {name: LABEL, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}},
			{name: P, valueFrom: {fieldRef: {fieldPath: status.podIP}}}, {name: O, valueFrom: {configMapKeyRef: {name: c, key: none, optional: true}}}]`,
			run:  `echo "$C_k $A $B $M $U $NODE $LABEL $P ${O-unset}"`,
			want: `^of-map of-secret of-secret-\$\(A\)-\$\(NONE\) 32 10 w[0-9]+ environment [0-9.]+ unset\n`},
		{name: "no-links", spec: "enableServiceLinks: false", run: "env | grep SERVICE_HOST",
			want: `^KUBERNETES_SERVICE_HOST=\S+\n$`},
		{name: "files",
			spec: `volumes: [{name: v, projected: {defaultMode: 0440, sources: [{configMap: {name: c, items: [{key: k, path: d/k, mode: 0400}]}}, {secret: {name: s}},
			{downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}, {configMap: {name: none, optional: true}}]}}]`,
			main: "volumeMounts: [{name: v, mountPath: /v}]", run: "cat /v/d/k /v/labels; stat -Lc %a /v/d/k /v/labels",
			want: `^of-mapapp="files"400\n440\n`},
		{name: "token", spec: "volumes: [{name: v, projected: {sources: [{serviceAccountToken: {path: t, audience: " +
			"vault, expirationSeconds: 700}}]}}]", main: "volumeMounts: [{name: v, mountPath: /v}]",
			run: "cut -d. -f2 /v/t | tr '_-' '/+' | base64 -d 2>/dev/null", want: `"aud":(\["vault"\]|"vault")`},
		{name: "no-token", spec: "automountServiceAccountToken: false", run: "ls /var/run/secrets 2>&1",
			want: `No such file`},
		{name: "subpath", spec: vol, main: `env: [{name: W, valueFrom: {fieldRef: {fieldPath: metadata.name}}}], ` +
			`volumeMounts: [{name: v, mountPath: /v}, {name: v, mountPath: /a, subPath: x/y}, {name: v, mountPath: ` +
			`/b, subPathExpr: z/$(W)}]`,
			run: "touch /a/f /b/g; cd /v; find . -type f | sort", want: `^./x/y/f\n./z/subpath/g\n`},
		{name: "mounts", spec: vol,
			main: "volumeMounts: [{name: v, mountPath: /r, readOnly: true, recursiveReadOnly: " +
				"Enabled}, {name: v, mountPath: /s, mountPropagation: HostToContainer}, {name: v, mountPath: /p}]",
			run:  "grep -E ' /[rsp] ' /proc/self/mountinfo | cut -d' ' -f5-7",
			want: `(?m)^/r ro(?s:.*)^/s rw(?s:.*)^/p rw`},
		{name: "memory-medium", spec: "volumes: [{name: v, emptyDir: {medium: Memory, sizeLimit: 2Mi}}]",
			main: "volumeMounts: [{name: v, mountPath: /v}]", run: "grep ' /v ' /proc/mounts",
			want: `^tmpfs /v tmpfs \S*size=2048k`},
		{name: "directory", main: "workingDir: /etc", run: "pwd", want: `^/etc\n`},
		{name: "terminal", main: "tty: true", run: "test -t 1 && echo terminal", want: `terminal`},
		{name: "hook", spec: vol, main: "volumeMounts: [{name: v, mountPath: /v}], lifecycle: {postStart: {exec: " +
			"{command: [sh, -c, 'echo hooked >/v/h']}}}", run: "until [ -s /v/h ]; do sleep 0.1; done; cat /v/h",
			want: `^hooked\n`},
		{name: "deadline", spec: "terminationGracePeriodSeconds: 90, os: {name: linux}",
			main: "lifecycle: {stopSignal: SIGUSR1}",
			run:  "trap 'echo usr1; exit 0' USR1; echo set; while :; do sleep 0.1; done", want: `^set\nusr1\n`,
			deadlineAfter: "set\n", until: hasFailed("DeadlineExceeded")},
		{name: "last-words", spec: vol, main: "volumeMounts: [{name: v, mountPath: /v}], terminationMessagePath: " +
			"/v/last", run: "echo farewell >/v/last", until: hasTerminationMessage("farewell\n")},
		{name: "last-lines", main: "terminationMessagePolicy: FallbackToLogsOnError", run: "echo from the log; exit 3",
			until: hasTerminationMessage("from the log\n")},
		{name: "rules", spec: vol,
			main: "volumeMounts: [{name: v, mountPath: /v}], restartPolicy: Never, restartPolicyRules: [{action: " +
				"Restart, exitCodes: {operator: In, values: [42]}}]",
			run: "[ -e /v/again ] && exit 7; touch /v/again; exit 42",
			until: func(p *v1.Pod) error {
				if cs := p.Status.ContainerStatuses; p.Status.Phase != v1.PodFailed || cs[0].RestartCount != 1 ||
					cs[0].State.Terminated.ExitCode != 7 {
					return fmt.Errorf("%s: %+v", p.Status.Phase, cs)
				}
				return nil
			}},
		{name: "own-policy", spec: "restartPolicy: Always", main: "restartPolicy: Never", run: "exit 0",
			until: hasPhase(v1.PodSucceeded)},
		{name: "never-pull", main: "image: keelson.dev/no:1, imagePullPolicy: Never",
			until: hasWaitingReason("ErrImageNeverPull")},
		{name: "non-root", main: "securityContext: {runAsNonRoot: true}",
			until: hasWaitingReason("CreateContainerConfigError")},
		{name: "gate", spec: "schedulingGates: [{name: a.test/b}]",
			until: hasFalseCondition(v1.PodScheduled, "SchedulingGated")},
		{name: "other-scheduler", spec: "schedulerName: mine", until: hasPhase(v1.PodPending)},
		{name: "readiness-gate", spec: "readinessGates: [{conditionType: a.test/ok}]", run: "sleep 1000",
			until: hasFalseCondition(v1.PodReady, "ReadinessGatesNotReady")},
		// With hostNetwork the API refuses such a sysctl already.
		{name: "unsafe-sysctl", spec: "securityContext: {sysctls: [{name: kernel.msgmax, value: '8192'}]}",
			until: hasFailed("SysctlForbidden")},
	}
}

// podFieldsOfResources are the cases of resource limits and of the status that reports them.
func podFieldsOfResources() []podFieldCase {
	return []podFieldCase{
		{name: "limits", main: "resources: {limits: {memory: 48Mi}}",
			run:  "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null",
			want: `50331648`},
		{name: "pod-limits", spec: "resources: {limits: {cpu: 500m, memory: 48Mi}}", // F129
			run:  "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null",
			want: `50331648`},
		{name: "reported", spec: "resources: {limits: {cpu: 500m, memory: 48Mi}}, securityContext: " +
			"{runAsUser: 1000, runAsGroup: 2000, supplementalGroups: [3000]}, os: {name: linux}",
			main: "lifecycle: {stopSignal: SIGUSR1}", run: "sleep 1000",
			until: func(p *v1.Pod) error { // F115, F129
				if len(p.Status.ContainerStatuses) == 0 || p.Status.Resources == nil {
					return fmt.Errorf("status %+v", p.Status)
				}
				s, r := p.Status.ContainerStatuses[0], p.Status.Resources
				if u := s.User; u == nil || u.Linux.UID != 1000 || u.Linux.GID != 2000 ||
					!slices.Contains(u.Linux.SupplementalGroups, 3000) ||
					s.StopSignal == nil || *s.StopSignal != v1.SIGUSR1 {
					return fmt.Errorf("container status %+v", s)
				}
				if r.Limits.Memory().String() != "48Mi" || p.Status.AllocatedResources.Cpu().String() != "500m" ||
					p.Status.QOSClass != v1.PodQOSGuaranteed {
					return fmt.Errorf("class %s, allocated %v, resources %v", p.Status.QOSClass,
						p.Status.AllocatedResources, r)
				}
				return nil
			}},
	}
}

func hasPhase(want v1.PodPhase) func(*v1.Pod) error {
	return func(p *v1.Pod) error {
		if p.Status.Phase != want {
			return fmt.Errorf("phase %s", p.Status.Phase)
		}
		return nil
	}
}

func hasFailed(reason string) func(*v1.Pod) error {
	return func(p *v1.Pod) error {
		if p.Status.Phase != v1.PodFailed || p.Status.Reason != reason {
			return fmt.Errorf("%s, reason %q: %s", p.Status.Phase, p.Status.Reason, p.Status.Message)
		}
		return nil
	}
}

func hasFalseCondition(kind v1.PodConditionType, reason string) func(*v1.Pod) error {
	return func(p *v1.Pod) error {
		for _, c := range p.Status.Conditions {
			if c.Type == kind && c.Status == v1.ConditionFalse && c.Reason == reason {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", p.Status.Conditions)
	}
}

func hasWaitingReason(reason string) func(*v1.Pod) error {
	return func(p *v1.Pod) error {
		for _, c := range p.Status.ContainerStatuses {
			if c.State.Waiting != nil && c.State.Waiting.Reason == reason {
				return nil
			}
		}
		return fmt.Errorf("%+v", p.Status.ContainerStatuses)
	}
}

func hasTerminationMessage(want string) func(*v1.Pod) error {
	return func(p *v1.Pod) error {
		for _, c := range p.Status.ContainerStatuses {
			if t := c.State.Terminated; t != nil && t.Message == want {
				return nil
			}
		}
		return fmt.Errorf("%+v", p.Status.ContainerStatuses)
	}
}

func hasTerminated(p *v1.Pod) error {
	if p.Status.Phase != v1.PodSucceeded && p.Status.Phase != v1.PodFailed {
		return fmt.Errorf("%s: %+v", p.Status.Phase, p.Status.ContainerStatuses)
	}
	return nil
}

// newPod returns the pod of the case.
func (p podFieldCase) newPod(t *testing.T) *v1.Pod {
	t.Helper()
	run, err := json.Marshal(p.run)
	if err != nil {
		t.Fatal(err)
	}
	main := "name: main, command: [sh, -c, " + string(run) + "]"
	if !strings.Contains(p.main, "image:") {
		main += ", image: " + tools
	}
	spec := p.spec
	if !strings.Contains(spec, "restartPolicy:") {
		spec = strings.TrimSuffix("restartPolicy: Never, "+spec, ", ")
	}
	if !strings.Contains(spec, "terminationGracePeriodSeconds:") {
		spec = "terminationGracePeriodSeconds: 3, " + spec
	}
	text := "{metadata: {name: " + p.name + ", labels: {app: " + p.name + "}}, spec: {" + spec +
		", containers: [{" + strings.TrimSuffix(main+", "+p.main, ", ") + "}]}}"
	out := &v1.Pod{}
	if err := yaml.UnmarshalStrict([]byte(text), out); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return out
}

// Each field of a manifest has its effect: a pod for each of many fields, all created at once, and
// the effect that its program sees.
func TestPromisesAreKept(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	_, err := w.cs.CoreV1().ConfigMaps(w.ns).Create(ctx,
		&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Data: map[string]string{"k": "of-map"}},
		metav1.CreateOptions{})
	if err == nil {
		_, err = w.cs.CoreV1().Secrets(w.ns).Create(ctx,
			&v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": "of-secret"}},
			metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	w.createService(webService("other", v1.ServiceTypeClusterIP))
	testenv.Eventually(t, soon, func() error {
		_, err := w.cs.CoreV1().ServiceAccounts(w.ns).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	all := podFieldCases()
	for _, p := range all {
		w.createPod(p.newPod(t))
	}
	for _, p := range all {
		t.Run(p.name, func(t *testing.T) {
			in := testNamespace{t, w.cs, w.ns}
			until := p.until
			if until == nil {
				until = hasTerminated
			}
			if p.deadlineAfter != "" {
				in.awaitKctl([]string{"-n", w.ns, "logs", p.name}, p.deadlineAfter)
				testenv.Kctl(t, "-n", w.ns, "patch", "pod", p.name, "-p", `{"spec": {"activeDeadlineSeconds": 1}}`)
			}
			in.awaitPod(p.name, until)
			if p.want == "" {
				return
			}
			body, err := w.cs.CoreV1().Pods(w.ns).GetLogs(p.name, &v1.PodLogOptions{}).Stream(ctx)
			if err != nil {
				t.Fatal(err)
			}
			defer body.Close()
			log, err := io.ReadAll(body)
			if err != nil || !regexp.MustCompile(strings.ReplaceAll(p.want, "NS", w.ns)).Match(log) {
				t.Errorf("%v, the program's output is\n%s\nwant %s", err, log, p.want)
			}
		})
	}
}
