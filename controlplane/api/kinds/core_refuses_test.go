package kinds_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// F38: a finalizer of a built-in kind is standard or has a domain.
func TestFinalizerNames(t *testing.T) {
	kindstest.CheckRefused[*corev1.ConfigMap](t,
		kindstest.BadObject{Text: "{metadata: {name: a, finalizers: [nodomain]}}",
			Want: kindstest.InvalidText("metadata.finalizers[0]", "nodomain", kindstest.NotQualified)},
		kindstest.BadObject{Text: "{metadata: {name: a, finalizers: [example.com/x, kubernetes, orphan, a.b]}}",
			Want: kindstest.InvalidText("metadata.finalizers[3]", "a.b", kindstest.NotQualified)},
		kindstest.BadObject{Text: "{metadata: {name: a, finalizers: [foregroundDeletion]}}", Want: ""},
	)
	kindstest.CheckRefused[*storagev1.CSIDriver](t,
		kindstest.BadObject{Text: "{metadata: {name: a, finalizers: [x]}, spec: {}}",
			Want: kindstest.InvalidText("metadata.finalizers[0]", "x", kindstest.NotQualified)})
	kindstest.CheckRefused[*appsv1.ControllerRevision](t,
		kindstest.BadObject{Text: "{metadata: {name: a, finalizers: [x]}, data: {}, revision: 1}",
			Want: kindstest.InvalidText("metadata.finalizers[0]", "x", kindstest.NotQualified)})
	// Kubernetes never qualified those of budgets and of core Events.
	kindstest.CheckRefused[*policyv1.PodDisruptionBudget](t,
		kindstest.BadObject{Text: "{metadata: {name: a, finalizers: [x]}, spec: {minAvailable: 1, selector: {}}}",
			Want: ""})
	kindstest.CheckRefused[*corev1.Event](t,
		kindstest.BadObject{Text: "{metadata: {name: a, finalizers: [x]}, involvedObject: {kind: Pod}}", Want: ""})
	kindstest.CheckChanges(t, "{metadata: {name: a}}", kindstest.Change[*corev1.Namespace]{Sub: "finalize",
		Change: func(ns *corev1.Namespace) { ns.Spec.Finalizers = []corev1.FinalizerName{"kubernetes", "nodomain"} },
		Want:   kindstest.InvalidText("spec.finalizers[1]", "nodomain", kindstest.NotQualified)})
}
