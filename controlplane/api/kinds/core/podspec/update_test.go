package podspec_test

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestPodUpdate(t *testing.T) {
	stored := kindstest.Load[*corev1.Pod](t, `
metadata: {name: a, generation: 1}
spec:
  tolerations: [{key: a, operator: Exists}]
  schedulingGates: [{name: g}]
  containers: [{name: c, image: i}]
`)
	for _, c := range []struct {
		name       string
		change     func(*corev1.Pod)
		wrong      []string
		generation int64
	}{
		{"nothing", func(p *corev1.Pod) {}, nil, 1},
		{"labels", func(p *corev1.Pod) { p.Labels = map[string]string{"a": "b"} }, nil, 1},
		{"image", func(p *corev1.Pod) { p.Spec.Containers[0].Image = "j" }, nil, 2},
		{"toleration added", func(p *corev1.Pod) {
			p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: "b"})
		}, nil, 2},
		{"toleration removed", func(p *corev1.Pod) { p.Spec.Tolerations = nil }, []string{"spec.tolerations"}, 2},
		{"deadline", func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = new(int64(5)) }, nil, 2},
		{"gate removed", func(p *corev1.Pod) { p.Spec.SchedulingGates = nil }, nil, 2},
		{"gate added", func(p *corev1.Pod) {
			p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "h"})
		}, []string{"spec.schedulingGates[1].name"}, 2},
		{"bound", func(p *corev1.Pod) { p.Spec.NodeName = "w1" }, nil, 2}, // F90
		{"command", func(p *corev1.Pod) { p.Spec.Containers[0].Command = []string{"sh"} }, []string{"spec"}, 2},
		{"container added", func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d", Image: "i"})
		}, []string{"spec.containers"}, 2},
		{"host network", func(p *corev1.Pod) { p.Spec.HostNetwork = true }, []string{"spec"}, 2},
		{"name", func(p *corev1.Pod) { p.Name = "b" }, []string{"metadata.name"}, 1},
		{"status", func(p *corev1.Pod) { p.Status.Phase = "Running" }, nil, 1},
		{"debug container", func(p *corev1.Pod) {
			p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{}}
		}, []string{"spec"}, 2},
	} {
		got, wrong := kindstest.RunUpdate(t, stored, "", c.change)
		if !slices.Equal(wrong, c.wrong) || got.Generation != c.generation {
			t.Errorf("%s: errors at %q, generation %d; want %q, %d", c.name, wrong, got.Generation,
				c.wrong, c.generation)
		}
		if got.Status.Phase != corev1.PodPending {
			t.Errorf("%s: the main resource wrote what belongs to a subresource", c.name)
		}
	}
	bound := stored.DeepCopy()
	bound.Spec.NodeName = "w1"
	if _, wrong := kindstest.RunUpdate(t, bound, "", func(p *corev1.Pod) {
		p.Spec.NodeName = "w2"
	}); !slices.Equal(wrong, []string{"spec"}) {
		t.Errorf("moved to another node: %q", wrong) // F90: exactly one bind
	}
}

func TestPodSubresources(t *testing.T) {
	stored := kindstest.Load[*corev1.Pod](t, kindstest.PodText)
	stored.Status.QOSClass = corev1.PodQOSBestEffort
	got, wrong := kindstest.RunUpdate(t, stored, "status", func(p *corev1.Pod) {
		p.Spec.NodeName = "w9"
		p.Finalizers = []string{"a/b"}
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n", UID: "u"}}
		p.Status = corev1.PodStatus{Phase: corev1.PodRunning}
	})
	if wrong != nil || got.Spec.NodeName != "" || !slices.Equal(got.Finalizers, []string{"a/b"}) ||
		got.OwnerReferences != nil || got.Status.Phase != corev1.PodRunning ||
		got.Status.QOSClass != corev1.PodQOSBestEffort {
		t.Errorf("status: %q, %+v", wrong, got)
	}
	if _, wrong := kindstest.RunUpdate(t, stored, "status", func(p *corev1.Pod) {
		p.Status.QOSClass = corev1.PodQOSGuaranteed
	}); !slices.Equal(wrong, []string{"status.qosClass"}) {
		t.Errorf("class: %q", wrong)
	}
}

func TestGracePeriod(t *testing.T) {
	for _, c := range []struct {
		node      string
		phase     corev1.PodPhase
		spec      *int64
		requested *int64
		want      int64
	}{
		{"", "Pending", nil, new(int64(10)), 0},
		{"w1", "Succeeded", nil, nil, 0},
		{"w1", "Failed", nil, nil, 0},
		{"w1", "Running", nil, nil, 30},
		{"w1", "Running", new(int64(5)), nil, 5},
		{"w1", "Running", new(int64(5)), new(int64(60)), 60},
		{"w1", "Running", new(int64(5)), new(int64(0)), 0},
		{"w1", "Running", nil, new(int64(-3)), 1},
	} {
		p := &corev1.Pod{Spec: corev1.PodSpec{NodeName: c.node, TerminationGracePeriodSeconds: c.spec},
			Status: corev1.PodStatus{Phase: c.phase}}
		if got := podspec.PodGracePeriod(p, c.requested); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}
