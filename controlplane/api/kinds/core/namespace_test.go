package core_test

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// F38: the phase of a Namespace follows its deletionTimestamp.
func TestNamespaceStatusPhase(t *testing.T) {
	const active, going = "{metadata: {name: a}, status: {phase: Active}}",
		"{metadata: {name: a, deletionTimestamp: '2026-01-02T03:04:05Z'}, status: {phase: Terminating}}"
	set := func(p corev1.NamespacePhase) func(*corev1.Namespace) {
		return func(ns *corev1.Namespace) { ns.Status.Phase = p }
	}
	onlyActive := func(p string) string {
		return kindstest.InvalidText("status.Phase", p, "may only be 'Active' if `deletionTimestamp` is empty")
	}
	onlyTerminating := func(p string) string {
		return kindstest.InvalidText("status.Phase", p, "may only be 'Terminating' if `deletionTimestamp` is not empty")
	}
	kindstest.CheckChanges(t, active,
		kindstest.Change[*corev1.Namespace]{Sub: "status", Change: set("Active")},
		kindstest.Change[*corev1.Namespace]{Sub: "status", Change: set("Terminating"), Want: onlyActive("Terminating")},
		kindstest.Change[*corev1.Namespace]{Sub: "status", Change: set(""), Want: onlyActive("")})
	kindstest.CheckChanges(t, going,
		kindstest.Change[*corev1.Namespace]{Sub: "status", Change: set("Terminating")},
		kindstest.Change[*corev1.Namespace]{Sub: "status", Change: set("Active"), Want: onlyTerminating("Active")})
}

// F38: a new Namespace keeps the finalizers in its spec and gets the finalizer "kubernetes".
func TestNamespaceFinalizersOnCreate(t *testing.T) {
	for text, want := range map[string][]corev1.FinalizerName{
		"{metadata: {name: a}}": {"kubernetes"},
		"{metadata: {name: a}, spec: {finalizers: [example.com/a]}}": {"example.com/a",
			"kubernetes"},
		"{metadata: {name: a}, spec: {finalizers: [kubernetes, example.com/a]}, status: {phase: Z}}": {"kubernetes",
			"example.com/a"},
	} {
		ns := kindstest.Load[*corev1.Namespace](t, text)
		kinds.All().ByType(ns).Writes.PrepareCreate(ns)
		if !slices.Equal(ns.Spec.Finalizers, want) || ns.Status.Phase != corev1.NamespaceActive || ns.Generation != 0 {
			t.Errorf("%s: finalizers %q, phase %q, generation %d", text, ns.Spec.Finalizers,
				ns.Status.Phase, ns.Generation)
		}
	}
	kindstest.CheckRefused[*corev1.Namespace](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {finalizers: [kubernetes, nodomain]}}",
			Want: kindstest.InvalidText("spec.finalizers", "nodomain", kindstest.NotQualified)})
}

// F38: subresource finalize writes and validates the metadata and spec.finalizers, and keeps the status.
func TestNamespaceFinalize(t *testing.T) {
	kindstest.CheckChanges(t, "{metadata: {name: a}}",
		kindstest.Change[*corev1.Namespace]{Sub: "finalize",
			Change: func(ns *corev1.Namespace) {
				ns.Spec.Finalizers = []corev1.FinalizerName{"kubernetes", "nodomain"}
			},
			Want: kindstest.InvalidText("spec.finalizers[1]", "nodomain", kindstest.NotQualified)},
		kindstest.Change[*corev1.Namespace]{Sub: "finalize",
			Change: func(ns *corev1.Namespace) { ns.Finalizers = []string{"example.com/a", "nodomain"} },
			Want:   kindstest.InvalidText("metadata.finalizers[1]", "nodomain", kindstest.NotQualified)},
		kindstest.Change[*corev1.Namespace]{Sub: "finalize",
			Change: func(ns *corev1.Namespace) {
				ns.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n"}}
			},
			Want: "metadata.ownerReferences[0].uid: Required value: must not be empty"})
	stored := kindstest.Load[*corev1.Namespace](t,
		"{metadata: {name: a}, spec: {finalizers: [kubernetes]}, status: {phase: Active}}")
	for _, sub := range []string{"finalize", "status"} {
		got, wrong := kindstest.RunUpdate(t, stored, sub, func(ns *corev1.Namespace) {
			ns.Labels, ns.Finalizers = map[string]string{"b": "c"}, []string{"example.com/a"}
		})
		if wrong != nil || got.Labels["b"] != "c" || got.Labels[corev1.LabelMetadataName] != "a" ||
			len(got.Finalizers) != 1 {
			t.Errorf("metadata after a request to %s: %q, %+v", sub, wrong, got.ObjectMeta)
		}
	}
	got, _ := kindstest.RunUpdate(t, stored, "finalize", func(ns *corev1.Namespace) {
		ns.Spec.Finalizers, ns.Status.Phase = nil, "Terminating"
	})
	if len(got.Spec.Finalizers) != 0 || got.Status.Phase != corev1.NamespaceActive {
		t.Errorf("finalizers %q, phase %q", got.Spec.Finalizers, got.Status.Phase)
	}
	// The registry stores what PrepareUpdate leaves, without the defaults.
	unnamed := stored.DeepCopy()
	for _, sub := range []string{"finalize", "status"} {
		unnamed.Labels = nil
		kinds.All().ByType(stored).Subresources[sub].PrepareUpdate(unnamed, stored)
		if unnamed.Labels[corev1.LabelMetadataName] != "a" {
			t.Errorf("labels after a request without labels to %s: %v", sub, unnamed.Labels)
		}
	}
}
