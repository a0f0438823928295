package core_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// The provider's ID of a node is for life, and each change of it has its own fault. F38
func TestProviderIDStays(t *testing.T) {
	id := func(text string) func(*corev1.Node) { return func(n *corev1.Node) { n.Spec.ProviderID = text } }
	const at = "spec.providerID: Invalid value: null: field cannot be "
	kindstest.CheckChanges(t, "{metadata: {name: a}, spec: {providerID: x}}",
		kindstest.Change[*corev1.Node]{Change: id("x")},
		kindstest.Change[*corev1.Node]{Generation: 1, Change: id("y"), Want: at + "modified once set"},
		kindstest.Change[*corev1.Node]{Generation: 1, Change: id(""), Want: at + "cleared once set"},
	)
}
