package nodefeatures

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func podLevel(cpu string) *corev1.PodSpec {
	return &corev1.PodSpec{Resources: &corev1.ResourceRequirements{
		Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}}}
}

// F128, F129: which features of a node pods require, to run and to be changed.
func TestRequiredFeatures(t *testing.T) {
	plain := &corev1.PodSpec{}
	debugged := &corev1.PodSpec{EphemeralContainers: []corev1.EphemeralContainer{{TargetContainerName: "c"}}}
	for _, c := range []struct {
		name string
		got  []string
		want string
	}{
		{"plain pod to run", RequiredToRun(plain), ""},
		{"pod with resources to run", RequiredToRun(podLevel("1")), PodLevelResources},
		{"pod with an ephemeral container to run", RequiredToRun(debugged), EphemeralContainers},
		{"added ephemeral container", RequiredToUpdate(plain, debugged), EphemeralContainers},
		{"unchanged ephemeral container", RequiredToUpdate(debugged, debugged), ""},
		{"unchanged pod with resources", RequiredToUpdate(podLevel("1"), podLevel("1000m")), ""},
		{"plain pod unchanged", RequiredToUpdate(plain, plain), ""},
		{"changed resources of a pod", RequiredToUpdate(podLevel("1"), podLevel("2")), PodLevelResize},
		{"added resources of a pod", RequiredToUpdate(plain, podLevel("2")), PodLevelResize},
	} {
		if got := strings.Join(c.got, " "); got != c.want {
			t.Errorf("%s requires %q, want %q", c.name, got, c.want)
		}
	}
	if !slices.IsSortedFunc(features, func(a, b feature) int { return strings.Compare(a.name, b.name) }) {
		t.Error("the features are not sorted by name")
	}
}

// F129: a node of an earlier release declares no features, and lacks what the pod requires.
func TestMissingFeatures(t *testing.T) {
	required := []string{PodLevelResize, PodLevelResources}
	for _, c := range []struct {
		declared []string
		want     string
	}{
		{nil, PodLevelResize + ", " + PodLevelResources},
		{[]string{PodLevelResources}, PodLevelResize},
		{[]string{"A", PodLevelResize, PodLevelResources}, ""},
	} {
		node := &corev1.Node{Status: corev1.NodeStatus{DeclaredFeatures: c.declared}}
		if got := List(Missing(required, node)); got != c.want {
			t.Errorf("a node that declares %v lacks %q, want %q", c.declared, got, c.want)
		}
	}
}
