package statefulset_test

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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

func claims(w *testcluster.Cluster) []string {
	w.T.Helper()
	list, err := client.List[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", metav1.ListOptions{})
	if err != nil {
		w.T.Fatal(err)
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
		w := testcluster.StartCluster(t, testcluster.Options{})
		seen, err := w.WatchPods()
		if err != nil {
			t.Fatal(err)
		}
		defer seen.Stop()
		w.CreateObject(testcluster.NewStatefulSet("db", 3, "db:1"))
		w.AwaitStatefulSet("db", 3)
		if got := strings.Join(claims(w), " "); got != "data-db-0 data-db-1 data-db-2" {
			t.Errorf("claims %s", got)
		}
		for _, p := range w.LivePods() {
			if p.Spec.Hostname != p.Name || p.Spec.Subdomain != "db" ||
				p.Labels[appsv1.StatefulSetPodNameLabel] != p.Name ||
				p.Spec.Volumes[0].PersistentVolumeClaim.ClaimName != "data-"+p.Name {
				t.Errorf("%s: %+v %v", p.Name, p.Spec, p.Labels)
			}
		}
		testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Template.Spec.Containers[0].Image = "db:2" })
		w.AwaitStatefulSet("db", 3)
		testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { n := int32(1); s.Spec.Replicas = &n })
		w.AwaitStatefulSet("db", 1)
		if got := strings.Join(claims(w), " "); got != "data-db-0 data-db-1 data-db-2" {
			t.Errorf("claims after scaling down: %s", got)
		}
		want := "+db-0 +db-1 +db-2 -db-2 +db-2 -db-1 +db-1 -db-0 +db-0 -db-2 -db-1"
		if got := order(seen, strings.Count(want, "db")); got != want {
			t.Errorf("pods came and went in the order\n%s, want\n%s", got, want)
		}
		// Back to the first template: its revision is the newest again.
		testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Template.Spec.Containers[0].Image = "db:1" })
		w.AwaitStatefulSet("db", 1)
		revisions, err := client.List[*appsv1.ControllerRevision](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil || len(revisions) != 2 {
			t.Fatalf("%d revisions, %v", len(revisions), err)
		}
		if n := max(revisions[0].Revision, revisions[1].Revision); n != 3 {
			t.Errorf("newest revision is number %d", n)
		}
		testcluster.Update(w, "db", func(s *appsv1.StatefulSet) {
			s.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{
				WhenDeleted: appsv1.DeletePersistentVolumeClaimRetentionPolicyType,
				WhenScaled:  appsv1.DeletePersistentVolumeClaimRetentionPolicyType}
			n := int32(2)
			s.Spec.Replicas = &n
		})
		w.AwaitStatefulSet("db", 2)
		testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { n := int32(1); s.Spec.Replicas = &n })
		w.Eventually("the claim of db-1 goes with it", func() error {
			if got := strings.Join(claims(w), " "); got != "data-db-0 data-db-2" {
				return fmt.Errorf("%s", got)
			}
			return nil
		})
		if err := client.Delete[*appsv1.StatefulSet](w.Ctx, w.Admin, "default", "db", metav1.DeleteOptions{}); err !=
			nil {
			t.Fatal(err)
		}
		w.Eventually("the claim of db-0 goes with the set", func() error {
			if got := strings.Join(claims(w), " "); got != "data-db-2" || len(w.LivePods()) != 0 {
				return fmt.Errorf("%s, %d pods", got, len(w.LivePods()))
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
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true,
			ChangeController: testcluster.CutOff("statefulset-controller", 3, 3*time.Millisecond)})
		w.CreateObject(testcluster.NewStatefulSet("db", 4, "db:0"))
		par := testcluster.NewStatefulSet("par", 5, "db:0")
		par.Spec.PodManagementPolicy = appsv1.ParallelPodManagement
		w.CreateObject(par)
		for round := range 6 {
			image := fmt.Sprintf("db:%d", round+1)
			n := int32(2 + rnd.IntN(4))
			for _, name := range []string{"db", "par"} {
				testcluster.Update(w, name, func(s *appsv1.StatefulSet) {
					s.Spec.Template.Spec.Containers[0].Image, s.Spec.Replicas = image, &n
				})
			}
			if pods := w.LivePods(); len(pods) > 0 {
				err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", pods[rnd.IntN(len(pods))].Name,
					metav1.DeleteOptions{})
				if err != nil && !apierrors.IsNotFound(err) {
					t.Fatal(err)
				}
			}
			w.AwaitStatefulSet("db", n)
			w.AwaitStatefulSet("par", n)
			for _, p := range w.LivePods() {
				if p.Spec.Containers[0].Image != image {
					t.Errorf("%s runs %s, want %s", p.Name, p.Spec.Containers[0].Image, image)
				}
			}
		}
	})
}
