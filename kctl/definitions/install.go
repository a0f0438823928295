package definitions

import (
	"context"
	"fmt"
	"maps"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"keelson.dev/keelson/internal/wait"
)

// resource is the resource of CustomResourceDefinitions.
var resource = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// mostConflicts is the maximum number of attempts to update a definition that other clients change.
const mostConflicts = 5

// poll is the interval at which a new definition is read until its kind is served.
const poll = 50 * time.Millisecond

// Outcome is the result of the installation of one definition.
type Outcome struct {
	Name    string
	Verdict Verdict
	Reason  string
}

// Install installs the definitions and returns when their kinds are served or ctx is done. It calls
// told for each definition. An existing definition is never replaced by an older one, or by one of
// another origin.
func (b Bundle) Install(ctx context.Context, cluster dynamic.Interface, told func(Outcome)) error {
	all, err := b.Definitions()
	if err != nil {
		return err
	}
	for _, want := range all {
		o, err := b.install(ctx, cluster.Resource(resource), want)
		if err != nil {
			return fmt.Errorf("installing CustomResourceDefinition %s: %w", want.GetName(), err)
		}
		told(o)
	}
	for _, want := range all {
		if err := wait.For(ctx, poll, func() error { return served(ctx, cluster.Resource(resource), want.GetName()) }); err != nil {
			return fmt.Errorf("waiting for CustomResourceDefinition %s to be served: %w", want.GetName(), err)
		}
	}
	return nil
}

// install creates or updates one definition if Judge decides so.
func (b Bundle) install(ctx context.Context, cluster dynamic.ResourceInterface, want *unstructured.Unstructured) (Outcome, error) {
	var last error
	for range mostConflicts {
		have, err := cluster.Get(ctx, want.GetName(), metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			have = nil
		case err != nil:
			return Outcome{}, err
		}
		o := Outcome{Name: want.GetName()}
		o.Verdict, o.Reason = b.Judge(have, want)
		switch o.Verdict {
		case Create:
			_, err = cluster.Create(ctx, want, metav1.CreateOptions{})
		case Upgrade:
			_, err = cluster.Update(ctx, upgraded(have, want), metav1.UpdateOptions{})
		}
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			return o, err
		}
		last = err
	}
	return Outcome{}, last
}

// upgraded returns the existing definition with the spec of want. Metadata of other clients is
// kept.
func upgraded(have, want *unstructured.Unstructured) *unstructured.Unstructured {
	out := have.DeepCopy()
	out.Object["spec"] = want.DeepCopy().Object["spec"]
	notes, marks := out.GetAnnotations(), out.GetLabels()
	if notes == nil {
		notes = map[string]string{}
	}
	maps.Copy(notes, want.GetAnnotations())
	out.SetAnnotations(notes)
	if len(want.GetLabels()) > 0 {
		if marks == nil {
			marks = map[string]string{}
		}
		maps.Copy(marks, want.GetLabels())
		out.SetLabels(marks)
	}
	return out
}

// served returns an error while the kind of a definition is not served.
func served(ctx context.Context, cluster dynamic.ResourceInterface, name string) error {
	have, err := cluster.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	conditions, _, _ := unstructured.NestedSlice(have.Object, "status", "conditions")
	why := "the control plane has not looked at it: is there a leader?"
	for _, c := range conditions {
		m, _ := c.(map[string]any)
		if m["status"] == "True" && m["type"] == "Established" {
			return nil
		}
		if m["status"] == "False" {
			why = fmt.Sprintf("%v: %v", m["reason"], m["message"])
		}
	}
	return fmt.Errorf("the kind is not served: %s", why)
}
