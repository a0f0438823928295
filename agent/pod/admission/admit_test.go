package admission

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Under memory pressure, a node rejects pods without memory requests that do not tolerate it. Under
// disk pressure, it rejects all but critical pods. Pods admitted earlier stay. F95
func TestPressureRefuses(t *testing.T) {
	tolerant, burstable, critical := simplePod("tolerant"), simplePod("burstable"), simplePod("critical")
	tolerant.Spec.Tolerations = []v1.Toleration{{Key: v1.TaintNodeMemoryPressure, Operator: v1.TolerationOpExists}}
	burstable.Spec.Containers[0].Resources.Requests = v1.ResourceList{v1.ResourceMemory: resource.MustParse("1Mi")}
	critical.Spec.Priority = new(int32(2000000000))
	known := simplePod("known")
	known.Status.StartTime = &metav1.Time{Time: epoch}
	pods := []*v1.Pod{simplePod("best-effort"), tolerant, burstable, critical, known}
	for conditions, refused := range map[string][]string{
		"":                             nil,
		"PIDPressure":                  nil,
		"MemoryPressure":               {"best-effort"},
		"DiskPressure":                 {"best-effort", "tolerant", "burstable"},
		"MemoryPressure, DiskPressure": {"best-effort", "tolerant", "burstable"},
	} {
		nd := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"},
			Status: v1.NodeStatus{Allocatable: v1.ResourceList{v1.ResourceMemory: resource.MustParse("1Gi")}}}
		for _, c := range []v1.NodeConditionType{v1.NodeMemoryPressure, v1.NodeDiskPressure, v1.NodePIDPressure} {
			status := v1.ConditionFalse
			if strings.Contains(conditions, string(c)) {
				status = v1.ConditionTrue
			}
			nd.Status.Conditions = append(nd.Status.Conditions, v1.NodeCondition{Type: c, Status: status})
		}
		var got []string
		for _, p := range pods {
			s := CheckNode(p, nil, nd)
			if s == nil {
				continue
			}
			got = append(got, string(p.UID))
			if want := "Pod was rejected: The node had condition: [" + strings.ReplaceAll(conditions, ",", "") +
				"]. "; s.Reason != "Evicted" || s.Message != want || s.StoredNode {
				t.Errorf("%s of %s: %+v", conditions, p.UID, s)
			}
		}
		if !slices.Equal(got, refused) {
			t.Errorf("%s refuses %v, want %v", conditions, got, refused)
		}
	}
}

// A pod on the host network cannot set network sysctls, because they would change the node.
func TestSysctlsOfTheNodeAreRefused(t *testing.T) {
	for _, c := range []struct {
		name         string
		network, ipc bool
		want         string
	}{
		{"net.ipv4.tcp_syncookies", false, false, ""},
		{"net.ipv4.tcp_syncookies", true, false, "SysctlForbidden"},
		{"kernel.shm_rmid_forced", true, false, ""},
		{"kernel.shm_rmid_forced", false, true, "SysctlForbidden"},
		{"kernel.msgmax", false, false, "SysctlForbidden"},
	} {
		p := simplePod("u1")
		p.Spec.HostNetwork, p.Spec.HostIPC = c.network, c.ipc
		p.Spec.SecurityContext = &v1.PodSecurityContext{Sysctls: []v1.Sysctl{{Name: c.name, Value: "1"}}}
		got := ""
		if s := CheckNode(p, nil, &v1.Node{}); s != nil {
			got = s.Reason
		}
		if got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

// The node grants available resources, waits for those of other pods, and never exceeds its
// capacity.
func TestGrant(t *testing.T) {
	node := &v1.Node{Status: v1.NodeStatus{Allocatable: amounts("cpu=4 memory=4Gi")}}
	shrinking := sized("o3", "cpu=500m memory=1Gi", "")
	shrinking.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "app",
		Resources: &v1.ResourceRequirements{Requests: amounts("cpu=2 memory=1Gi")}}}
	for _, c := range []struct {
		name, has, want string
		others          []*v1.Pod
		node            *v1.Node
		reason, message string
	}{
		{"alone on its node", "cpu=1 memory=1Gi", "cpu=4 memory=4Gi", nil, node, "", ""},
		{"more than the node", "cpu=1 memory=1Gi", "cpu=5 memory=1Gi", nil, node, "Infeasible",
			"Node didn't have enough capacity: cpu, requested: 5000, capacity: 4000"},
		{"more memory than the node", "cpu=1 memory=1Gi", "cpu=5 memory=5Gi", nil, node, "Infeasible",
			"Node didn't have enough capacity: memory, requested: 5368709120, capacity: 4294967296"},
		{"another has it", "cpu=1 memory=1Gi", "cpu=3 memory=1Gi", []*v1.Pod{sized("o1", "cpu=2 memory=1Gi", "")}, node,
			"Deferred", "Node didn't have enough resource: cpu, requested: 3000, used: 2000, capacity: 4000"},
		{"beside another", "cpu=1 memory=1Gi", "cpu=2 memory=1Gi", []*v1.Pod{sized("o1", "cpu=2 memory=1Gi", "")}, node,
			"", ""},
		{"another shrinks and is not done", "cpu=1 memory=1Gi", "cpu=3 memory=1Gi", []*v1.Pod{shrinking}, node,
			"Deferred", "Node didn't have enough resource: cpu, requested: 3000, used: 2000, capacity: 4000"},
		{"less, on a node that has become too small", "cpu=3 memory=1Gi", "cpu=2 memory=1Gi",
			[]*v1.Pod{sized("o1", "cpu=3 memory=1Gi", "")}, node, "", ""},
		{"less CPU and more memory there", "cpu=3 memory=1Gi", "cpu=2 memory=2Gi",
			[]*v1.Pod{sized("o1", "cpu=3 memory=1Gi", "")}, node, "", ""},
	} {
		reason, message := CheckResize(sized("u1", c.want, ""), sized("u1", c.has, ""), c.others, c.node)
		if reason != c.reason || message != c.message {
			t.Errorf("%s: %q %q", c.name, reason, message)
		}
	}
}

func TestParseCeiling(t *testing.T) {
	for text, want := range map[string]string{"privileged": "<nil>", "baseline": "baseline:latest",
		"restricted:v1.25": "restricted:v1.25"} {
		c, err := ParseCeiling(text)
		got := "<nil>"
		if c != nil {
			got = c.level.String()
		}
		if err != nil || got != want {
			t.Errorf("%s: %s, %v", text, got, err)
		}
	}
	for text, words := range map[string]string{"": "must be one of", "strict": `level "strict"`,
		"baseline:2": `version "2"`} {
		if _, err := ParseCeiling(text); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// An agent rejects a pod with a field that it does not support, and names the field.
func TestIncapable(t *testing.T) {
	no := false
	for want, spec := range map[string]v1.PodSpec{
		"spec.hostUsers": {HostUsers: &no},
		"spec.containers[0].env[0].valueFrom.fileKeyRef": {Containers: []v1.Container{{Env: []v1.EnvVar{
			{ValueFrom: &v1.EnvVarSource{FileKeyRef: &v1.FileKeySelector{}}}}}}},
		"spec.volumes[0].projected.sources[0].clusterTrustBundle": {Volumes: []v1.Volume{{VolumeSource: v1.VolumeSource{
			Projected: &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{
				{ClusterTrustBundle: &v1.ClusterTrustBundleProjection{}}}}}}}},
	} {
		got := RejectUnsupported(&v1.Pod{Spec: spec})
		if got == nil || !strings.HasPrefix(got.Message, fmt.Sprintf("Pod was rejected: %s: this node ", want)) {
			t.Errorf("%s: %+v", want, got)
		}
	}
	if got := RejectUnsupported(simplePod("u1")); got != nil {
		t.Errorf("a plain pod: %+v", got)
	}
}

// A pod for another operating system is rejected with kubelet's reason and message.
func TestPodOfAnotherSystemIsRejected(t *testing.T) {
	field, label, both := simplePod("u1"), simplePod("u2"), simplePod("u3")
	windows := &v1.PodOS{Name: v1.Windows}
	no := false
	field.Spec.OS, field.Spec.HostUsers = windows, &no
	label.Labels = map[string]string{v1.LabelOSStable: "windows"}
	both.Spec.OS, both.Labels = windows, label.Labels
	const (
		byField = "Pod was rejected: Failed to admit pod as the OS field doesn't match node OS"
		byLabel = "Pod was rejected: Failed to admit pod as the `kubernetes.io/os` label doesn't match node label"
	)
	for _, c := range []struct {
		name, reason, message string
		pod                   *v1.Pod
	}{{"field", "PodOSNotSupported", byField, field}, {"label", "PodOSSelectorNodeLabelDoesNotMatch", byLabel, label},
		{"field and label", "PodOSSelectorNodeLabelDoesNotMatch", byLabel, both}} {
		if got := RejectUnsupported(c.pod); got == nil || got.Reason != c.reason || got.Message != c.message ||
			!got.Rejected {
			t.Errorf("%s: %+v, want %s %q", c.name, got, c.reason, c.message)
		}
	}
	linux := simplePod("u4")
	linux.Spec.OS, linux.Labels = &v1.PodOS{Name: v1.Linux}, map[string]string{v1.LabelOSStable: "linux"}
	if got := RejectUnsupported(linux); got != nil {
		t.Errorf("a pod for linux: %+v", got)
	}
}
