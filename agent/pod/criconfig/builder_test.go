package criconfig

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"pgregory.net/rapid"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

func TestExpand(t *testing.T) {
	vars := map[string]string{"A": "1", "B": "two", "EMPTY": ""}
	lookup := func(n string) (string, bool) { v, ok := vars[n]; return v, ok }
	for in, want := range map[string]string{
		"$(A)": "1", "$(A)-$(B)": "1-two", "$$(A)": "$(A)", "$$$(A)": "$1", "$(NONE)": "$(NONE)", "$(A": "$(A",
		"$": "$", "$A": "$A", "a$$b": "a$b", "$(EMPTY)x": "x", "$$": "$", "$(A)$": "1$", "": "",
	} {
		if got := expandVariables(in, lookup); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
	rapid.Check(t, func(r *rapid.T) {
		s := rapid.StringMatching(`[a$()A]{0,20}`).Draw(r, "s")
		if got := expandVariables(s, func(string) (string, bool) { return "", false }); len(got) > len(s) {
			r.Fatalf("%q grows to %q although nothing is known", s, got)
		}
		if doubled := strings.ReplaceAll(s, "$", "$$"); expandVariables(doubled, lookup) != s {
			r.Fatalf("%q is not what its escaped form %q becomes", s, doubled)
		}
	})
}

func envOf(t *testing.T, c *fake.Cluster, p *v1.Pod) map[string]string {
	t.Helper()
	kv, err := environment{objects: c, pod: p,
		allocatable: v1.ResourceList{v1.ResourceMemory: resource.MustParse("8Gi")}}.buildVariables(
		&p.Spec.Containers[0])
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
		&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "cm"},
			Data: map[string]string{"K": "v", "not a name=": "x"}},
		&v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"},
			Data: map[string][]byte{"P": []byte("geheim")}},
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"},
			Spec: v1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []v1.ServicePort{{Name: "https", Port: 443}}}},
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "my-db"},
			Spec: v1.ServiceSpec{ClusterIP: "10.96.0.9",
				Ports: []v1.ServicePort{{Port: 5432, Protocol: v1.ProtocolTCP}}}},
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "headless"},
			Spec: v1.ServiceSpec{ClusterIP: "None", Ports: []v1.ServicePort{{Port: 1}}}},
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "far"},
			Spec: v1.ServiceSpec{ClusterIP: "10.96.0.8", Ports: []v1.ServicePort{{Port: 1}}}},
	)
	yes := true
	p := simplePod("u1", v1.Container{Name: "app",
		Resources: v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("1500m")},
			Limits: v1.ResourceList{}},
		EnvFrom: []v1.EnvFromSource{{Prefix: "CM_",
			ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}}},
			{SecretRef: &v1.SecretEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "absent"},
				Optional: &yes}}},
		Env: []v1.EnvVar{
			{Name: "PLAIN", Value: "x"}, {Name: "REF", Value: "$(PLAIN)/$(CM_K)/$(KUBERNETES_SERVICE_HOST)/$(LATER)"},
			{Name: "LATER", Value: "y"},
			{Name: "POD", ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
			{Name: "IP", ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
			{Name: "LABEL",
				ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "metadata.labels['a/b']"}}},
			{Name: "CPU",
				ValueFrom: &v1.EnvVarSource{ResourceFieldRef: &v1.ResourceFieldSelector{Resource: "requests.cpu"}}},
			{Name: "MEM",
				ValueFrom: &v1.EnvVarSource{ResourceFieldRef: &v1.ResourceFieldSelector{Resource: "limits.memory",
					Divisor: resource.MustParse("1Gi")}}},
			{Name: "SECRET",
				ValueFrom: &v1.EnvVarSource{SecretKeyRef: &v1.SecretKeySelector{
					LocalObjectReference: v1.LocalObjectReference{Name: "s"}, Key: "P"}}},
			{Name: "GONE",
				ValueFrom: &v1.EnvVarSource{ConfigMapKeyRef: &v1.ConfigMapKeySelector{
					LocalObjectReference: v1.LocalObjectReference{Name: "cm"}, Key: "none", Optional: &yes}}},
			{Name: "MY_DB_PORT", Value: "mine"},
		}})
	p.Labels, p.Status.PodIP = map[string]string{"a/b": "label"}, "10.88.0.2"
	got := envOf(t, c, p)
	for k, want := range map[string]string{"CM_K": "v", "PLAIN": "x", "REF": "x/v/10.96.0.1/$(LATER)", "POD": "web-u1",
		"IP": "10.88.0.2", "LABEL": "label", "CPU": "2", "MEM": "8", "SECRET": "geheim",
		"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443",
		"KUBERNETES_SERVICE_PORT_HTTPS": "443", "KUBERNETES_PORT_443_TCP_ADDR": "10.96.0.1",
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
	p.Spec.Containers[0].Env = []v1.EnvVar{{Name: "X",
		ValueFrom: &v1.EnvVarSource{SecretKeyRef: &v1.SecretKeySelector{
			LocalObjectReference: v1.LocalObjectReference{Name: "s"}, Key: "none"}}}}
	if _, err := (environment{objects: c, pod: p}).buildVariables(&p.Spec.Containers[0]); err == nil ||
		err.Error() != "couldn't find key none in Secret default/s" {
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
		p := simplePod("u1", v1.Container{Name: "app",
			Resources: v1.ResourceRequirements{Requests: c.requests, Limits: c.limits}})
		r := lifecycle.ContainerResources(p, &p.Spec.Containers[0], 4<<30)
		if lifecycle.QOS(p) != c.class || r.CpuShares != c.shares || r.CpuQuota != c.quota ||
			r.MemoryLimitInBytes != c.memory || r.OomScoreAdj != c.score || cgroupParent("k", p) != c.parent {
			t.Errorf("%v/%v: %s %v %s", c.requests, c.limits, lifecycle.QOS(p), r, cgroupParent("k", p))
		}
	}
	p := simplePod("u1", v1.Container{Name: "a", Resources: v1.ResourceRequirements{Limits: q("1", "1Gi")}},
		v1.Container{Name: "b", Resources: v1.ResourceRequirements{Limits: q("1", "")}})
	if r := lifecycle.PodResources(p); r.CpuQuota != 200000 || r.MemoryLimitInBytes != 0 {
		t.Errorf("a pod with one container without memory limit: %v", r)
	}
}

// F129, F104: resources of the whole pod bound its cgroup and the containers without limits of their
// own, and count for the OOM score.
func TestPodLevelResources(t *testing.T) {
	q := func(text string) v1.ResourceList {
		l := v1.ResourceList{}
		for _, f := range strings.Fields(text) {
			name, amount, _ := strings.Cut(f, "=")
			l[v1.ResourceName(name)] = resource.MustParse(amount)
		}
		return l
	}
	sized := func(name, requests, limits string) v1.Container {
		return v1.Container{Name: name, Resources: v1.ResourceRequirements{Requests: q(requests), Limits: q(limits)}}
	}
	p := simplePod("u1", sized("a", "", ""), sized("b", "cpu=500m memory=1Gi", "cpu=1 memory=1Gi"))
	p.Spec.Resources = &v1.ResourceRequirements{Requests: q("cpu=2 memory=2Gi hugepages-2Mi=4Mi"),
		Limits: q("cpu=3 memory=4Gi hugepages-2Mi=4Mi")}
	r := lifecycle.PodResources(p)
	if r.CpuShares != 2048 || r.CpuQuota != 300_000 || r.MemoryLimitInBytes != 4<<30 || len(r.HugepageLimits) != 1 ||
		r.HugepageLimits[0].PageSize != "2MB" || r.HugepageLimits[0].Limit != 4<<20 {
		t.Errorf("the pod's cgroup has %v", r)
	}
	if class := lifecycle.QOS(p); class != v1.PodQOSBurstable {
		t.Errorf("class %s", class)
	}
	for i, want := range []struct{ shares, quota, memory, score int64 }{
		{3072, 300_000, 4 << 30, 1000 - 1000*512/8192}, {512, 100_000, 1 << 30, 1000 - 1000*1536/8192}} {
		r := lifecycle.ContainerResources(p, &p.Spec.Containers[i], 8<<30)
		if r.CpuShares != want.shares || r.CpuQuota != want.quota || r.MemoryLimitInBytes != want.memory ||
			r.OomScoreAdj != want.score || len(r.HugepageLimits) != 1 {
			t.Errorf("container %d has %v, want %+v", i, r, want)
		}
	}
	for container, want := range map[string]string{"a": "4096", "b": "1024"} {
		got, err := agent.ResourceValue(p, container, &v1.ResourceFieldSelector{Resource: "limits.memory",
			Divisor: resource.MustParse("1Mi")}, q("memory=64Gi"))
		if err != nil || got != want {
			t.Errorf("container %s reads the limit %s Mi (%v), want %s", container, got, err, want)
		}
	}
	// Only the memory has a limit of the pod: the quota is the sum only if every container has a limit.
	p.Spec.Resources = &v1.ResourceRequirements{Requests: q("memory=2Gi"), Limits: q("memory=4Gi")}
	if r := lifecycle.PodResources(p); r.CpuQuota != 0 || r.MemoryLimitInBytes != 4<<30 || r.CpuShares != 512 {
		t.Errorf("the cgroup of a pod with a limit of memory alone has %v", r)
	}
	p.Spec.Containers = p.Spec.Containers[1:]
	if r := lifecycle.PodResources(p); r.CpuQuota != 100_000 || r.MemoryLimitInBytes != 4<<30 {
		t.Errorf("the cgroup of a pod whose container limits its CPU has %v", r)
	}
	p.Spec.Resources = &v1.ResourceRequirements{Requests: q("cpu=1 memory=1Gi"), Limits: q("cpu=1 memory=1Gi")}
	if class := lifecycle.QOS(p); class != v1.PodQOSGuaranteed {
		t.Errorf("class %s", class)
	}
}

// F104: a sidecar is not killed for memory before the regular container with the smallest request.
func TestOOMScoreOfSidecar(t *testing.T) {
	memory := func(amount string) v1.ResourceRequirements {
		return v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceMemory: resource.MustParse(amount)}}
	}
	always := v1.ContainerRestartPolicyAlways
	for _, c := range []struct {
		own  string
		want int64
	}{{"64Mi", 500}, {"2Gi", 500}, {"3Gi", 250}} {
		p := simplePod("u1", v1.Container{Name: "a", Resources: memory("3Gi")},
			v1.Container{Name: "b", Resources: memory("2Gi")})
		p.Spec.InitContainers = []v1.Container{{Name: "side", RestartPolicy: &always, Resources: memory(c.own)},
			{Name: "init", Resources: memory("64Mi")}}
		if got := lifecycle.ContainerResources(p, &p.Spec.InitContainers[0], 4<<30).OomScoreAdj; got != c.want {
			t.Errorf("a sidecar that requests %s has score %d, want %d", c.own, got, c.want)
		}
		if got := lifecycle.ContainerResources(p, &p.Spec.InitContainers[1], 4<<30).OomScoreAdj; got != 985 {
			t.Errorf("an init container has score %d, want 985", got)
		}
	}
}

// With cgroup v2, a container that runs out of memory is killed as a whole, unless the node is
// configured otherwise.
func TestOOMGroup(t *testing.T) {
	p := simplePod("u1")
	for single, want := range map[bool]string{false: "1", true: ""} {
		b := New(Config{SingleProcessOOMKill: single, Memory: func() int64 { return 0 }}, nil)
		if got := b.containerLimits(p, &p.Spec.Containers[0]).Unified["memory.oom.group"]; got != want {
			t.Errorf("single process %v: memory.oom.group is %q, want %q", single, got, want)
		}
	}
}

func TestSecurityContext(t *testing.T) {
	i := func(n int64) *int64 { return &n }
	yes, no := true, false
	p := simplePod("u1")
	p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: i(1000), RunAsGroup: i(2000), FSGroup: i(3000),
		SupplementalGroups: []int64{4000},
		SeccompProfile:     &v1.SeccompProfile{Type: v1.SeccompProfileTypeRuntimeDefault}}
	p.Spec.Containers[0].SecurityContext = &v1.SecurityContext{RunAsUser: i(0), AllowPrivilegeEscalation: &no,
		ReadOnlyRootFilesystem: &yes, Capabilities: &v1.Capabilities{Add: []v1.Capability{"NET_ADMIN"},
			Drop: []v1.Capability{"ALL"}}}
	s := securityContext(p, &p.Spec.Containers[0], false)
	if s.RunAsUser.Value != 0 || s.RunAsGroup.Value != 2000 ||
		!slices.Equal(s.SupplementalGroups, []int64{4000, 3000}) || !s.NoNewPrivs || !s.ReadonlyRootfs ||
		s.Seccomp.ProfileType != cri.SecurityProfile_RuntimeDefault ||
		s.Capabilities.AddCapabilities[0] != "NET_ADMIN" || s.Capabilities.DropCapabilities[0] != "ALL" ||
		len(s.MaskedPaths) == 0 {
		t.Errorf("context: %v", s)
	}
	p.Spec.Containers[0].SecurityContext.Privileged = &yes
	if s := securityContext(p, &p.Spec.Containers[0], true); !s.Privileged || s.NoNewPrivs || len(s.MaskedPaths) != 0 ||
		s.Seccomp.ProfileType != cri.SecurityProfile_Unconfined {
		t.Errorf("privileged: %v", s)
	}
	p.Spec.Containers[0].SecurityContext = nil
	p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsNonRoot: &yes}
	for user, want := range map[string]string{"": "image will run as root", "0": "image will run as root",
		"nobody": "non-numeric user (nobody)", "1000:1000": "", "1": ""} {
		err := verifyNonRoot(p, &p.Spec.Containers[0], user)
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("image user %q: %v", user, err)
		}
	}
	p.Spec.SecurityContext.RunAsUser = i(0)
	if err := verifyNonRoot(p, &p.Spec.Containers[0], "1000"); err == nil ||
		!strings.Contains(err.Error(), "breaks non-root policy") {
		t.Errorf("runAsUser 0 with runAsNonRoot: %v", err)
	}
}

// The groups of a pod's volumes become supplemental groups of its containers, without duplicates.
// F38
func TestVolumeGroups(t *testing.T) {
	p, i := simplePod("u1"), func(n int64) *int64 { return &n }
	p.Spec.SecurityContext = &v1.PodSecurityContext{SupplementalGroups: []int64{4000}}
	mounts := map[string]agent.Mount{"a": {Group: i(6000)}, "b": {Group: i(5000)}, "c": {Group: i(5000)},
		"d": {Group: i(4000)}, "e": {}}
	got := addVolumeGroups(securityContext(p, &p.Spec.Containers[0], false), mounts).SupplementalGroups
	if !slices.Equal(got, []int64{4000, 5000, 6000}) {
		t.Errorf("supplemental groups %v", got)
	}
}

func TestDNS(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte("# c\nnameserver 192.0.2.1\nsearch example.com.\noptions timeout:1 ndots:2\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	var servers []string
	cluster := fake.NewCluster()
	b := New(Config{Objects: cluster, ResolvConf: file, ClusterDNS: func() []string { return servers }},
		func(*v1.Pod, string, string) {})
	text := func(p *v1.Pod) string {
		c, err := b.dnsConfig(p)
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
	if got := text(p); got !=
		"10.96.0.10|default.svc.cluster.local,svc.cluster.local,cluster.local,example.com|ndots:5" {
		t.Errorf("ClusterFirst: %s", got)
	}
	p.Spec.HostNetwork = true
	if got := text(p); got != host {
		t.Errorf("ClusterFirst on the host's network: %s", got)
	}
	v := "3"
	p.Spec.DNSPolicy, p.Spec.DNSConfig = v1.DNSNone,
		&v1.PodDNSConfig{Nameservers: []string{"192.0.2.7"}, Searches: []string{"a"},
			Options: []v1.PodDNSConfigOption{{Name: "ndots", Value: &v}}}
	if got := text(p); got != "192.0.2.7|a|ndots:3" {
		t.Errorf("None: %s", got)
	}
	p = simplePod("u2")
	p.Spec.HostNetwork, p.Spec.DNSPolicy = true, v1.DNSClusterFirstWithHostNet
	if got := text(p); got !=
		"10.96.0.10|default.svc.cluster.local,svc.cluster.local,cluster.local,example.com|ndots:5" {
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
		warning        string
	}{
		"systemd-resolved": {"nameserver 127.0.0.53\noptions edns0\nsearch a.example\n",
			"nameserver 192.0.2.1\nnameserver 192.0.2.2\nsearch a.example\n",
			"192.0.2.1 192.0.2.2", "127.0.0.53", ""},
		"it knows none itself": {"nameserver 127.0.0.53\n", "search .\n", "", "127.0.0.53",
			"the applied nameserver line is: none"},
		"another one": {"nameserver ::1\n", "", "", "::1", "the applied nameserver line is: none"},
		"one is beyond": {"nameserver 127.0.0.1\nnameserver 192.0.2.9\n", "nameserver 192.0.2.1\n",
			"192.0.2.9", "127.0.0.1 192.0.2.9", "the applied nameserver line is: 192.0.2.9"},
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
			var warnings string
			b := New(Config{Objects: cluster, ResolvConf: node, ResolvedConf: resolved},
				func(_ *v1.Pod, _, message string) { warnings += message })
			servers := func(on bool) string {
				p := simplePod("u1")
				p.Spec.DNSPolicy, p.Spec.HostNetwork = v1.DNSDefault, on
				c, err := b.dnsConfig(p)
				if err != nil {
					t.Fatal(err)
				}
				return strings.Join(c.Servers, " ")
			}
			if got := servers(true); got != test.on {
				t.Errorf("on the node's network: %q", got)
			}
			if warnings != "" {
				t.Errorf("a pod on the node's network has the warning %q", warnings)
			}
			if got := servers(false); got != test.own {
				t.Errorf("on a network of its own: %q", got)
			}
			if (warnings == "") != (test.warning == "") || !strings.Contains(warnings, test.warning) {
				t.Errorf("warnings: %q", warnings)
			}
		})
	}
}

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
	c, told := buildDNSConfig(p, "search node.example\noptions rotate\noptions timeout:1\n", []string{"10.96.0.10"},
		"cluster.local")
	if len(c.Servers) != 3 || c.Servers[2] != "192.0.2.2" || len(c.Searches) != 32 || c.Searches[3] != "node.example" ||
		strings.Join(c.Options, " ") != "ndots:2 edns0" {
		t.Errorf("%v", c)
	}
	if len(told) != 2 || told[0].reason != "DNSConfigForming" ||
		!strings.HasSuffix(told[0].message, "10.96.0.10 192.0.2.1 192.0.2.2") {
		t.Errorf("told: %v", told)
	}
	p.Spec.DNSConfig.Searches = []string{strings.Repeat("a.", 600), strings.Repeat("b.", 600)}
	if c, told := buildDNSConfig(p, "", []string{"10.96.0.10"}, "cluster.local"); len(c.Searches) != 4 ||
		len(told) != 2 {
		t.Errorf("long domains: %d, %v", len(c.Searches), told)
	}
	p.Spec.DNSConfig = nil
	if c, told := buildDNSConfig(p, "nameserver 192.0.2.9\noptions rotate\noptions timeout:1\n", nil,
		"cluster.local"); len(told) != 1 || told[0].reason != "MissingClusterDNS" ||
		strings.Join(c.Options, " ") != "rotate timeout:1" {
		t.Errorf("a cluster without DNS: %v %v", c, told)
	}
}

// All containers of a pod share its pseudoterminals, and each can allocate some. F105
func TestTerminalsOfAPod(t *testing.T) {
	for containers, want := range map[int]int{1: 256, 4: 64, 16: 16, 40: 16} {
		p := simplePod("u1")
		p.Spec.Containers = make([]v1.Container, containers-1)
		p.Spec.InitContainers = make([]v1.Container, 1)
		if got := terminalLimit(p); got != want {
			t.Errorf("%d containers: %d terminals each, want %d", containers, got, want)
		}
	}
}
