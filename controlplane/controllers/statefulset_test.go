package controllers_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/virtual"
)

// stateful is a StatefulSet with a claim for each pod.
func stateful(name string, n int32, image string) *appsv1.StatefulSet {
	d := app(name, n, image)
	return &appsv1.StatefulSet{
		ObjectMeta: d.ObjectMeta,
		Spec: appsv1.StatefulSetSpec{
			Replicas: &n, Selector: d.Spec.Selector, Template: d.Spec.Template, ServiceName: name,
			VolumeClaimTemplates: []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
			}}},
		},
	}
}

// statefulDone waits until a set has n pods, all of the newest template.
func (w *world) statefulDone(name string, n int32) {
	w.t.Helper()
	w.within(30*time.Second, "stateful set "+name, func() error {
		s, err := client.Get[*appsv1.StatefulSet](w.ctx, w.admin, "default", name)
		if err != nil {
			return err
		}
		if st := s.Status; st.ObservedGeneration != s.Generation || st.Replicas != n || st.AvailableReplicas != n || st.UpdatedReplicas != n ||
			st.CurrentRevision != st.UpdateRevision {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
}

func (w *world) claims() []string {
	w.t.Helper()
	list, err := client.List[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, c := range list {
		if c.DeletionTimestamp == nil {
			out = append(out, c.Name)
		}
	}
	slices.Sort(out)
	return out
}

// A StatefulSet creates its pods in order, each with a claim, updates them from the highest down,
// stores its revisions and deletes the highest first. Claims stay unless the policy is to delete
// them.
func TestStatefulSet(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		seen, err := w.watchPods()
		if err != nil {
			t.Fatal(err)
		}
		defer seen.Stop()
		w.create(stateful("db", 3, "db:1"))
		w.statefulDone("db", 3)
		if got := strings.Join(w.claims(), " "); got != "data-db-0 data-db-1 data-db-2" {
			t.Errorf("claims %s", got)
		}
		for _, p := range w.pods() {
			if p.Spec.Hostname != p.Name || p.Spec.Subdomain != "db" || p.Labels[appsv1.StatefulSetPodNameLabel] != p.Name ||
				p.Spec.Volumes[0].PersistentVolumeClaim.ClaimName != "data-"+p.Name {
				t.Errorf("%s: %+v %v", p.Name, p.Spec, p.Labels)
			}
		}
		update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Template.Spec.Containers[0].Image = "db:2" })
		w.statefulDone("db", 3)
		update(w, "db", func(s *appsv1.StatefulSet) { n := int32(1); s.Spec.Replicas = &n })
		w.statefulDone("db", 1)
		if got := strings.Join(w.claims(), " "); got != "data-db-0 data-db-1 data-db-2" {
			t.Errorf("claims after scaling down: %s", got)
		}
		want := "+db-0 +db-1 +db-2 -db-2 +db-2 -db-1 +db-1 -db-0 +db-0 -db-2 -db-1"
		if got := order(seen, strings.Count(want, "db")); got != want {
			t.Errorf("pods came and went in the order\n%s, want\n%s", got, want)
		}
		// Back to the first template: its revision is the newest again.
		update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Template.Spec.Containers[0].Image = "db:1" })
		w.statefulDone("db", 1)
		revisions, err := client.List[*appsv1.ControllerRevision](w.ctx, w.admin, "default", metav1.ListOptions{})
		if err != nil || len(revisions) != 2 {
			t.Fatalf("%d revisions, %v", len(revisions), err)
		}
		if n := max(revisions[0].Revision, revisions[1].Revision); n != 3 {
			t.Errorf("newest revision is number %d", n)
		}
		update(w, "db", func(s *appsv1.StatefulSet) {
			s.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{
				WhenDeleted: appsv1.DeletePersistentVolumeClaimRetentionPolicyType, WhenScaled: appsv1.DeletePersistentVolumeClaimRetentionPolicyType}
			n := int32(2)
			s.Spec.Replicas = &n
		})
		w.statefulDone("db", 2)
		update(w, "db", func(s *appsv1.StatefulSet) { n := int32(1); s.Spec.Replicas = &n })
		w.eventually("the claim of db-1 goes with it", func() error {
			if got := strings.Join(w.claims(), " "); got != "data-db-0 data-db-2" {
				return fmt.Errorf("%s", got)
			}
			return nil
		})
		if err := client.Delete[*appsv1.StatefulSet](w.ctx, w.admin, "default", "db", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("the claim of db-0 goes with the set", func() error {
			if got := strings.Join(w.claims(), " "); got != "data-db-2" || len(w.pods()) != 0 {
				return fmt.Errorf("%s, %d pods", got, len(w.pods()))
			}
			return nil
		})
	})
}

// order returns in which order pods were created (+) and deleted (-), until n have been.
func order(seen watch.Interface, n int) string {
	var out []string
	going := map[string]bool{}
	for ev := range seen.ResultChan() {
		p := ev.Object.(*corev1.Pod)
		switch {
		case ev.Type == watch.Added:
			out = append(out, "+"+p.Name)
		case p.DeletionTimestamp != nil && !going[string(p.UID)]:
			going[string(p.UID)] = true
			out = append(out, "-"+p.Name)
		}
		if len(out) == n {
			break
		}
	}
	return strings.Join(out, " ")
}

// While pods disappear and fail, calls are lost and leaders change, a set never has two pods of one
// name, never exceeds the bound of an update, and reaches its desired state. F125
func TestStatefulSetThroughTrouble(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(7, 7))
		w := start(t, options{quiet: true, change: cutOff("statefulset-controller", 3, 3*time.Millisecond)})
		w.create(stateful("db", 4, "db:0"))
		par := stateful("par", 5, "db:0")
		par.Spec.PodManagementPolicy = appsv1.ParallelPodManagement
		w.create(par)
		for round := range 6 {
			image := fmt.Sprintf("db:%d", round+1)
			n := int32(2 + rnd.IntN(4))
			for _, name := range []string{"db", "par"} {
				update(w, name, func(s *appsv1.StatefulSet) {
					s.Spec.Template.Spec.Containers[0].Image, s.Spec.Replicas = image, &n
				})
			}
			if pods := w.pods(); len(pods) > 0 {
				err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", pods[rnd.IntN(len(pods))].Name, metav1.DeleteOptions{})
				if err != nil && !apierrors.IsNotFound(err) {
					t.Fatal(err)
				}
			}
			w.statefulDone("db", n)
			w.statefulDone("par", n)
			for _, p := range w.pods() {
				if p.Spec.Containers[0].Image != image {
					t.Errorf("%s runs %s, want %s", p.Name, p.Spec.Containers[0].Image, image)
				}
			}
		}
	})
}
