package namespace

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func object(name string, finalizers ...string) api.Object {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: finalizers}}
}

// P28: the status names the objects that block the namespace.
func TestStatusNamesTheBlocker(t *testing.T) {
	left := []Content{
		{Resource: "pods", Objects: []api.Object{object("b"), object("a"), object("d"), object("c")}},
		{Resource: "deployments.apps", Objects: []api.Object{object("web", "example.com/x", "foregroundDeletion")}},
		{Resource: "secrets"},
	}
	s := TerminatingStatus(&corev1.Namespace{}, left, []error{errors.New("listing things: refused")}, epoch)
	want := map[corev1.NamespaceConditionType]string{
		corev1.NamespaceDeletionDiscoveryFailure: "False ResourcesDiscovered: All resources successfully discovered",
		corev1.NamespaceDeletionGVParsingFailure: "False ParsedGroupVersions: All legacy kube types " +
			"successfully parsed",
		corev1.NamespaceDeletionContentFailure: "True ContentDeletionFailed: Failed to delete all resource types, 1 " +
			"remaining: listing things: refused",
		corev1.NamespaceContentRemaining: "True SomeResourcesRemain: Some resources are remaining: " +
			"deployments.apps has 1 resource instances (web), pods. has 4 resource instances (a, b, c, ...)",
		corev1.NamespaceFinalizersRemaining: "True SomeFinalizersRemain: Some content in the namespace has " +
			"finalizers remaining: example.com/x in 1 resource instances, foregroundDeletion in 1 resource instances",
	}
	if s.Phase != corev1.NamespaceTerminating || len(s.Conditions) != len(want) {
		t.Fatalf("status %+v", s)
	}
	for _, c := range s.Conditions {
		if got := string(c.Status) + " " + c.Reason + ": " + c.Message; got != want[c.Type] {
			t.Errorf("%s\ngot  %s\nwant %s", c.Type, got, want[c.Type])
		}
	}
	// The time of a condition moves with its status only.
	later := TerminatingStatus(&corev1.Namespace{Status: s}, left[:1], nil, epoch.Add(time.Hour))
	for _, c := range later.Conditions {
		moved := c.LastTransitionTime.Time.After(epoch)
		if changes := c.Type == corev1.NamespaceDeletionContentFailure ||
			c.Type == corev1.NamespaceFinalizersRemaining; moved != changes {
			t.Errorf("%s: transition time moved: %v", c.Type, moved)
		}
	}
}
