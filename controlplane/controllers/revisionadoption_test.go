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
	"keelson.dev/keelson/controlplane/controllers/daemonset"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/statefulset"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

func orphanRevision(w *testcluster.Cluster, name, namespace, label string, owners ...metav1.OwnerReference) {
	w.T.Helper()
	w.CreateObject(&appsv1.ControllerRevision{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": label},
			OwnerReferences: owners,
			Finalizers:      []string{"example.com/hold"}},
		Data: runtime.RawExtension{Raw: []byte(`{"spec":{"template":{"$patch":"replace"}}}`)}, Revision: 1})
}

// adoptedRevisions returns the names of the revisions of orphanRevision in a namespace that have a controller.
func adoptedRevisions(w *testcluster.Cluster, namespace string) (names []string) {
	w.T.Helper()
	list, err := client.List[*appsv1.ControllerRevision](w.Ctx, w.Admin, namespace, metav1.ListOptions{})
	if err != nil {
		w.T.Fatal(err)
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
	template := testcluster.NewDeployment("web", 1, "web:1").Spec.Template
	for kind, c := range map[string]struct {
		controller func(engine.Deps) *engine.Descriptor
		owner      api.Object
		adopted    []string
		relabeled  []string // the controlled revisions after the labels of revision a no longer match
	}{
		"DaemonSet": {daemonset.New,
			&appsv1.DaemonSet{ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{Selector: selector, Template: template}},
			[]string{"a", "b"}, []string{"b"}},
		"StatefulSet": {statefulset.New, &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{
			Replicas: &zero, Selector: selector, Template: template}}, []string{"a", "b", "terminating"},
			[]string{"a", "b", "terminating"}},
	} {
		t.Run(kind, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
					Controllers: func(d engine.Deps) []*engine.Descriptor {
						return []*engine.Descriptor{c.controller(d)}
					}})
				w.CreateObject(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}})
				orphanRevision(w, "a", "default", "web")
				orphanRevision(w, "b", "default", "web")
				orphanRevision(w, "mismatch", "default", "else")
				orphanRevision(w, "foreign", "default", "web",
					metav1.OwnerReference{APIVersion: "apps/v1", Kind: kind, Name: "web", UID: "another",
						Controller: &yes})
				orphanRevision(w, "elsewhere", "other", "web")
				orphanRevision(w, "terminating", "default", "web")
				if err := client.Delete[*appsv1.ControllerRevision](w.Ctx, w.Admin, "default", "terminating",
					metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				w.CreateObject(c.owner.DeepCopyObject().(api.Object))
				w.Lead(engine.Options{})
				time.Sleep(10 * time.Second) // virtual
				if got := adoptedRevisions(w, "default"); !slices.Equal(got, c.adopted) {
					t.Fatalf("adopted are %v, want %v", got, c.adopted)
				}
				if got := adoptedRevisions(w, "other"); len(got) != 0 {
					t.Errorf("adopted in another namespace are %v", got)
				}
				w.Eventually("changing the labels of revision a", func() error {
					r, err := client.Get[*appsv1.ControllerRevision](w.Ctx, w.Admin, "default", "a")
					if err != nil {
						return err
					}
					r = r.DeepCopy()
					r.Labels["app"] = "mine"
					_, err = client.Update(w.Ctx, w.Admin, r)
					return err
				})
				time.Sleep(10 * time.Second) // virtual
				if got := adoptedRevisions(w, "default"); !slices.Equal(got, c.relabeled) {
					t.Errorf("after the change of the labels of a, %v are controlled, want %v", got, c.relabeled)
				}
			})
		})
	}
}

// F70: revisions of a StatefulSet that no longer match its selector do not count for revisionHistoryLimit, as in Kubernetes.
func TestRevisionsThatDoNotMatchAreNotCounted(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{statefulset.New(d)}
			}})
		zero, one := int32(0), int32(1)
		for _, name := range []string{"a", "b", "c"} {
			orphanRevision(w, name, "default", "web")
		}
		set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: appsv1.StatefulSetSpec{
				Replicas: &zero, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
				Template: testcluster.NewDeployment("web", 1, "web:1").Spec.Template}}
		w.CreateObject(set)
		w.Lead(engine.Options{})
		time.Sleep(10 * time.Second) // virtual
		for _, name := range []string{"a", "b"} {
			w.Eventually("changing the labels of revision "+name, func() error {
				r, err := client.Get[*appsv1.ControllerRevision](w.Ctx, w.Admin, "default", name)
				if err != nil {
					return err
				}
				r = r.DeepCopy()
				r.Labels["app"] = "other"
				_, err = client.Update(w.Ctx, w.Admin, r)
				return err
			})
		}
		time.Sleep(10 * time.Second) // virtual; the controller observes the labels
		w.Eventually("lowering the limit", func() error {
			s, err := client.Get[*appsv1.StatefulSet](w.Ctx, w.Admin, "default", "web")
			if err != nil {
				return err
			}
			s = s.DeepCopy()
			s.Spec.RevisionHistoryLimit = &one
			_, err = client.Update(w.Ctx, w.Admin, s)
			return err
		})
		time.Sleep(10 * time.Second) // virtual
		list, err := client.List[*appsv1.ControllerRevision](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			if r.DeletionTimestamp != nil {
				t.Errorf("revision %s was deleted, although only revision c and the current revision match the "+
					"selector", r.Name)
			}
		}
	})
}
