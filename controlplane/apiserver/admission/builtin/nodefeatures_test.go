package builtin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
)

// F128, F129: a pod does not reach a node whose agent would ignore its resources, whichever way it
// is bound, and is not resized there.
func TestPodsOnNodesWithoutFeatures(t *testing.T) {
	nodeOf := func(name string, features ...string) api.Object {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name},
			Status: corev1.NodeStatus{DeclaredFeatures: features}}
	}
	cluster := admissiontest.World{"nodes": {nodeOf("old"),
		nodeOf("new", "EphemeralContainers", "InPlacePodLevelResourcesVerticalScaling", "PodLevelResources")}}
	podOn := func(node, cpu string) *corev1.Pod {
		p := podOf(container("c", "", ""))
		p.Spec.NodeName = node
		if cpu != "" {
			p.Spec.Resources = &corev1.ResourceRequirements{Requests: list("cpu=" + cpu)}
		}
		return p
	}
	debugged := func(p *corev1.Pod) *corev1.Pod {
		p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{TargetContainerName: "c"}}
		return p
	}
	all := kinds.All()
	for _, c := range []struct {
		name     string
		old, pod *corev1.Pod
		facet    string
		want     string
	}{
		{"without a node", nil, podOn("", "1"), "", ""},
		{"plain pod on an old node", nil, podOn("old", ""), "", ""},
		{"new pod on a new node", nil, podOn("new", "1"), "", ""},
		{"new pod on an old node", nil, podOn("old", "1"), "",
			`pod requires features PodLevelResources which are not available on node "old": upgrade the agent of that node`},
		{"new pod on a missing node", nil, podOn("gone", "1"), "", `node "gone" not found`},
		{"bound to an old node", podOn("", "1"), podOn("old", "1"), "binding",
			`pod requires features PodLevelResources which are not available on node "old": upgrade the agent of that node`},
		{"bound to a new node", podOn("", "1"), podOn("new", "1"), "binding", ""},
		{"resized on a new node", podOn("new", "1"), podOn("new", "2"), "resize", ""},
		{"resized on an old node", podOn("old", "1"), podOn("old", "2"), "resize", "pod update requires features " +
			`InPlacePodLevelResourcesVerticalScaling which are not available on node "old": upgrade the agent of that node`},
		{"debugged on a new node", podOn("new", ""), debugged(podOn("new", "")), "ephemeralcontainers", ""},
		{"debugged without a node", podOn("", ""), debugged(podOn("", "")), "ephemeralcontainers", ""},
		{"debugged on an old node", podOn("old", ""), debugged(podOn("old", "")), "ephemeralcontainers",
			"pod update requires features EphemeralContainers which are not available on node \"old\": upgrade the " +
				"agent of that node"},
		{"debugged before it is bound to an old node", debugged(podOn("", "")), debugged(podOn("old", "")), "binding",
			"pod requires features EphemeralContainers which are not available on node \"old\": upgrade the agent of " +
				"that node"},
		{"unchanged on an old node", podOn("old", "1"), podOn("old", "1"), "", ""},
		{"status on an old node", podOn("old", "1"), podOn("old", "2"), "status", ""},
	} {
		a := admissiontest.CreateAttempt(all, c.pod)
		if c.old != nil {
			a = admissiontest.UpdateAttempt(all, c.old, c.pod)
		}
		a.Facet = c.facet
		got := ""
		if err := nodeFeatures(Config{Cluster: cluster})(t.Context(), a); err != nil {
			_, got, _ = strings.Cut(err.Error(), "is forbidden: ")
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// F55, F128, F129: while a replica of an earlier release may schedule, no pod is created that it
// would give to a node without the features.
func TestPodsWithFeaturesNeedTheLevel(t *testing.T) {
	tooLow := errors.New("the level is too low")
	c := Config{Cluster: admissiontest.World{}, RequireNodeFeatures: func(_ context.Context, feature string) error {
		return fmt.Errorf("%s: %w", feature, tooLow)
	}}
	all := kinds.All()
	plain, sized := podOf(container("c", "", "")), podOf(container("c", "", ""))
	sized.Spec.Resources = &corev1.ResourceRequirements{Requests: list("cpu=1")}
	if err := nodeFeatures(c)(t.Context(), admissiontest.CreateAttempt(all, plain)); err != nil {
		t.Errorf("a plain pod: %v", err)
	}
	err := nodeFeatures(c)(t.Context(), admissiontest.CreateAttempt(all, sized))
	if err == nil || !strings.Contains(err.Error(), "a pod that requires features PodLevelResources: "+tooLow.Error()) {
		t.Errorf("a pod with resources: %v", err)
	}
	debugged := plain.DeepCopy()
	debugged.Spec.EphemeralContainers = []corev1.EphemeralContainer{{TargetContainerName: "c"}}
	err = nodeFeatures(c)(t.Context(), admissiontest.UpdateAttempt(all, plain, debugged))
	if err == nil || !strings.Contains(err.Error(), "features EphemeralContainers: "+tooLow.Error()) {
		t.Errorf("an added ephemeral container: %v", err)
	}
	if err := nodeFeatures(c)(t.Context(), admissiontest.UpdateAttempt(all, sized, sized)); err != nil {
		t.Errorf("an update of such a pod: %v", err)
	}
}
