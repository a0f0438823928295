package namespace_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// flunders is an aggregated API with one resource, whose objects have finalizers until they are released.
type flunders struct {
	mu      sync.Mutex
	down    bool
	objects map[string]*metav1.PartialObjectMetadata // by path
}

func (f *flunders) Discover(context.Context) ([]engine.AggregatedResource, map[schema.GroupVersion]error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if gv := testcluster.FlunderResource.GroupVersion(); f.down {
		return nil, map[schema.GroupVersion]error{gv: fmt.Errorf("stale GroupVersion discovery: %v", gv)}
	}
	return []engine.AggregatedResource{{GroupVersionResource: testcluster.FlunderResource,
		APIResource: metav1.APIResource{
			Name: "flunders", Namespaced: true, Verbs: []string{"get", "list", "delete", "deletecollection"}}}}, nil
}

func (f *flunders) Call(_ context.Context, method, path string, _ url.Values, _ []byte) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.down {
		return nil, apierrors.NewServiceUnavailable("service unavailable")
	}
	var list metav1.PartialObjectMetadataList
	for at, o := range f.objects {
		if !strings.HasPrefix(at, path+"/") {
			continue
		}
		if method == http.MethodDelete {
			now := metav1.Now()
			o.DeletionTimestamp = &now
			if len(o.Finalizers) == 0 {
				delete(f.objects, at)
			}
			continue
		}
		list.Items = append(list.Items, *o)
	}
	return json.Marshal(list)
}

// P28: a namespace waits for the objects of aggregated APIs and deletes them. Its status has
// upstream's message about APIs that do not respond.
func TestNamespaceDeletionCoversAggregatedAPIs(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		const at = "/apis/wardle.example.com/v1alpha1/namespaces/short/flunders/a"
		f := &flunders{down: true, objects: map[string]*metav1.PartialObjectMetadata{
			at: {ObjectMeta: metav1.ObjectMeta{Namespace: "short", Name: "a",
				Finalizers: []string{"example.com/hold"}}}}}
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true, Aggregated: f,
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{namespace.New(d)}
			}})
		w.Lead(engine.Options{})
		w.CreateObject(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "short"}, Spec: corev1.NamespaceSpec{
			Finalizers: []corev1.FinalizerName{corev1.FinalizerKubernetes}}})
		if err := client.Delete[*corev1.Namespace](w.Ctx, w.Admin, "", "short", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		says := func(of corev1.NamespaceConditionType, want string) {
			t.Helper()
			w.Eventually(string(of), func() error {
				ns, err := client.Get[*corev1.Namespace](w.Ctx, w.Admin, "", "short")
				if err != nil {
					return err
				}
				for _, c := range ns.Status.Conditions {
					if got := fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message); c.Type == of && got != want {
						return fmt.Errorf("it says %s", got)
					} else if c.Type == of {
						return nil
					}
				}
				return errors.New("it is not there")
			})
		}
		says(corev1.NamespaceDeletionDiscoveryFailure,
			"True DiscoveryFailed: Discovery failed for some groups, 1 failing: "+
				"unable to retrieve the complete list of server APIs: wardle.example.com/v1alpha1: "+
				"stale GroupVersion discovery: wardle.example.com/v1alpha1")
		says(corev1.NamespaceDeletionContentFailure,
			"False ContentDeleted: All content successfully deleted, may be waiting on finalization")
		f.mu.Lock()
		f.down = false
		f.mu.Unlock()
		says(corev1.NamespaceContentRemaining, "True SomeResourcesRemain: Some resources are remaining: "+
			"flunders.wardle.example.com has 1 resource instances (a)")
		says(corev1.NamespaceDeletionDiscoveryFailure,
			"False ResourcesDiscovered: All resources successfully discovered")
		f.mu.Lock()
		delete(f.objects, at) // its finalizer was removed
		f.mu.Unlock()
		w.Eventually("the namespace is gone", func() error {
			_, err := client.Get[*corev1.Namespace](w.Ctx, w.Admin, "", "short")
			if apierrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(err, errors.New("it is there"))
		})
	})
}
