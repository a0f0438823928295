package controllers_test

import (
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/daemonset"
	"keelson.dev/keelson/controlplane/controllers/statefulset"
	"keelson.dev/keelson/internal/virtual"
)

func (w *world) orphanRevision(name, namespace, label string, owners ...metav1.OwnerReference) {
	w.t.Helper()
	w.create(&appsv1.ControllerRevision{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": label}, OwnerReferences: owners,
			Finalizers: []string{"example.com/hold"}},
		Data: runtime.RawExtension{Raw: []byte(`{"spec":{"template":{"$patch":"replace"}}}`)}, Revision: 1})
}

// adoptedRevisions returns the names of the revisions of orphanRevision in a namespace that have a controller.
func (w *world) adoptedRevisions(namespace string) (names []string) {
	w.t.Helper()
	list, err := client.List[*appsv1.ControllerRevision](w.ctx, w.admin, namespace, metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, r := range list {
		if ref := metav1.GetControllerOf(r); ref != nil && ref.UID != "another" && len(r.Finalizers) > 0 {
			names = append(names, r.Name)
		}
	}
	slices.Sort(names)
	return names
}

// F70: StatefulSets and DaemonSets adopt revisions without a controller. Only DaemonSets release revisions, as in Kubernetes.
func TestRevisionsAreAdoptedAsInKubernetes(t *testing.T) {
	zero, yes := int32(0), true
	meta := metav1.ObjectMeta{Namespace: "default", Name: "web"}
	selector := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	template := app("web", 1, "web:1").Spec.Template
	for kind, c := range map[string]struct {
		controller func(controllers.Deps) *controllers.Controller
		owner      api.Object
		adopted    []string
		relabeled  []string // the controlled revisions after the labels of revision a no longer match
	}{
		"DaemonSet": {daemonset.New, &appsv1.DaemonSet{ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{Selector: selector, Template: template}},
			[]string{"a", "b"}, []string{"b"}},
		"StatefulSet": {statefulset.New, &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{
			Replicas: &zero, Selector: selector, Template: template}}, []string{"a", "b", "terminating"}, []string{"a", "b", "terminating"}},
	} {
		t.Run(kind, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				w := newWorld(t, options{quiet: true, only: func(d controllers.Deps) []*controllers.Controller {
					return []*controllers.Controller{c.controller(d)}
				}})
				w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}})
				w.orphanRevision("a", "default", "web")
				w.orphanRevision("b", "default", "web")
				w.orphanRevision("mismatch", "default", "else")
				w.orphanRevision("foreign", "default", "web", metav1.OwnerReference{APIVersion: "apps/v1", Kind: kind, Name: "web", UID: "another", Controller: &yes})
				w.orphanRevision("elsewhere", "other", "web")
				w.orphanRevision("terminating", "default", "web")
				if err := client.Delete[*appsv1.ControllerRevision](w.ctx, w.admin, "default", "terminating", metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				w.create(c.owner.DeepCopyObject().(api.Object))
				w.lead(controllers.Options{})
				time.Sleep(10 * time.Second) // virtual
				if got := w.adoptedRevisions("default"); !slices.Equal(got, c.adopted) {
					t.Fatalf("adopted are %v, want %v", got, c.adopted)
				}
				if got := w.adoptedRevisions("other"); len(got) != 0 {
					t.Errorf("adopted in another namespace are %v", got)
				}
				w.eventually("changing the labels of revision a", func() error {
					r, err := client.Get[*appsv1.ControllerRevision](w.ctx, w.admin, "default", "a")
					if err != nil {
						return err
					}
					r = r.DeepCopy()
					r.Labels["app"] = "mine"
					_, err = client.Update(w.ctx, w.admin, r)
					return err
				})
				time.Sleep(10 * time.Second) // virtual
				if got := w.adoptedRevisions("default"); !slices.Equal(got, c.relabeled) {
					t.Errorf("after the change of the labels of a, %v are controlled, want %v", got, c.relabeled)
				}
			})
		})
	}
}
