package criconfig

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

// debuggedPod returns a pod with an ephemeral container.
func debuggedPod(change func(p *v1.Pod, debug *v1.Container)) *v1.Pod {
	p := simplePod("u1")
	p.Spec.EphemeralContainers = []v1.EphemeralContainer{{EphemeralContainerCommon: v1.EphemeralContainerCommon{
		Name: "debug", Image: "tools:1"}}}
	change(p, lifecycle.EphemeralSpec(p, 0))
	return p
}

// F128: a container joins the process namespace of its target, unless it shares one with all
// containers of the pod anyway.
func TestJoinProcesses(t *testing.T) {
	yes := true
	for _, c := range []struct {
		name   string
		change func(p *v1.Pod, debug *v1.Container)
		mode   cri.NamespaceMode
		target string
	}{
		{"own namespaces", func(*v1.Pod, *v1.Container) {}, cri.NamespaceMode_TARGET, "c1"},
		{"a shared namespace", func(p *v1.Pod, _ *v1.Container) { p.Spec.ShareProcessNamespace = &yes },
			cri.NamespaceMode_POD, ""},
		{"the namespace of the node", func(p *v1.Pod, _ *v1.Container) { p.Spec.HostPID = true },
			cri.NamespaceMode_NODE, ""},
	} {
		p := debuggedPod(c.change)
		config := &cri.ContainerConfig{Linux: &cri.LinuxContainerConfig{
			SecurityContext: securityContext(p, lifecycle.FindContainerSpec(p, "debug"), false)}}
		JoinProcesses(config, "c1")
		if o := config.Linux.SecurityContext.NamespaceOptions; o.Pid != c.mode || o.TargetId != c.target {
			t.Errorf("%s: %v", c.name, o)
		}
	}
}

// F128: an ephemeral container has no resources: it gets the least CPU, and is killed as early as
// its pod's class allows. A privileged one makes the configuration of the sandbox privileged. Its
// environment may refer to its own limits, which are those of the node.
func TestConfigOfEphemeralContainers(t *testing.T) {
	yes := true
	p := debuggedPod(func(p *v1.Pod, debug *v1.Container) {
		p.Spec.Containers[0].Resources.Requests = v1.ResourceList{v1.ResourceMemory: resource.MustParse("1Gi")}
		debug.SecurityContext = &v1.SecurityContext{Privileged: &yes}
		debug.Env = []v1.EnvVar{{Name: "LIMIT", ValueFrom: &v1.EnvVarSource{
			ResourceFieldRef: &v1.ResourceFieldSelector{Resource: "limits.memory"}}}}
	})
	debug := lifecycle.FindContainerSpec(p, "debug")
	if r := lifecycle.ContainerResources(p, debug, 4<<30); r.CpuShares != 2 || r.CpuQuota != 0 ||
		r.MemoryLimitInBytes != 0 || r.OomScoreAdj != 999 {
		t.Errorf("resources: %v", r)
	}
	b := New(Config{}, nil)
	if !b.sandboxSecurity(p).Privileged {
		t.Error("the sandbox is not privileged")
	}
	kv, err := environment{objects: fake.NewCluster(), pod: p,
		allocatable: v1.ResourceList{v1.ResourceMemory: resource.MustParse("8Gi")}}.buildVariables(debug)
	if err != nil || len(kv) == 0 || string(kv[0].Value) != "8589934592" {
		t.Errorf("environment: %v %v", kv, err)
	}
}
