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

	"keelson.dev/keelson/internal/retry"
	"keelson.dev/keelson/internal/wait"
)

// resource is the API resource of CustomResourceDefinitions, for the dynamic client.
var resource = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1",
	Resource: "customresourcedefinitions"}

// servedPollInterval is the interval at which Install reads an installed CustomResourceDefinition
// until its kind is served.
const servedPollInterval = 50 * time.Millisecond

// Outcome contains what Install did with one CustomResourceDefinition, and the reason.
type Outcome struct {
	Name    string
	Verdict Verdict
	Reason  string
}

// Install creates or upgrades the CustomResourceDefinitions (CRDs) of the bundle in a cluster. It
// calls report with the result for each CRD. It returns when all their kinds are served, or with an
// error when ctx is done. It never replaces an existing CRD with an older one, or with one of
// another project or channel.
func (b Bundle) Install(ctx context.Context, cluster dynamic.Interface, report func(Outcome)) error {
	all, err := b.Definitions()
	if err != nil {
		return err
	}
	for _, want := range all {
		o, err := b.installDefinition(ctx, cluster.Resource(resource), want)
		if err != nil {
			return fmt.Errorf("installing CustomResourceDefinition %s: %w", want.GetName(), err)
		}
		report(o)
	}
	for _, want := range all {
		if err := wait.For(ctx, servedPollInterval, func() error {
			return checkServed(ctx, cluster.Resource(resource), want.GetName())
		}); err != nil {
			return fmt.Errorf("waiting for CustomResourceDefinition %s to be served: %w", want.GetName(), err)
		}
	}
	return nil
}

// installDefinition creates the CustomResourceDefinition want, or upgrades the existing one, as
// Judge decides. It returns what it did. It retries after conflicts with other clients.
func (b Bundle) installDefinition(
	ctx context.Context, cluster dynamic.ResourceInterface, want *unstructured.Unstructured,
) (Outcome, error) {
	var o Outcome
	err := retry.OnConflict(retry.DefaultTries, func() (again bool, err error) {
		o = Outcome{}
		have, err := cluster.Get(ctx, want.GetName(), metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			have = nil
		case err != nil:
			return false, err
		}
		o.Name = want.GetName()
		o.Verdict, o.Reason = b.Judge(have, want)
		switch o.Verdict {
		case Create:
			_, err = cluster.Create(ctx, want, metav1.CreateOptions{})
		case Upgrade:
			_, err = cluster.Update(ctx, upgradedDefinition(have, want), metav1.UpdateOptions{})
		}
		return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err), err
	})
	return o, err
}

// upgradedDefinition returns a copy of have, the cluster's CustomResourceDefinition, with the spec
// of want. The labels and annotations of both are merged; the values of want have precedence.
func upgradedDefinition(have, want *unstructured.Unstructured) *unstructured.Unstructured {
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

// checkServed returns nil if the cluster serves the kind of the CustomResourceDefinition with the
// given name. Otherwise it returns an error with the reason.
func checkServed(ctx context.Context, cluster dynamic.ResourceInterface, name string) error {
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
