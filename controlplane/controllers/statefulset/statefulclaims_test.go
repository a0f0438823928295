package statefulset_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

const (
	retainClaims = appsv1.RetainPersistentVolumeClaimRetentionPolicyType
	deleteClaims = appsv1.DeletePersistentVolumeClaimRetentionPolicyType
)

// statefulRetaining returns a StatefulSet db of two pods with a claim retention policy.
func statefulRetaining(deleted, scaled appsv1.PersistentVolumeClaimRetentionPolicyType) *appsv1.StatefulSet {
	set := testcluster.NewStatefulSet("db", 2, "db:1")
	set.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{
		WhenDeleted: deleted, WhenScaled: scaled}
	return set
}

func scaleStateful(w *testcluster.Cluster, name string, n int32) {
	w.T.Helper()
	testcluster.Update(w, name, func(s *appsv1.StatefulSet) { s.Spec.Replicas = &n })
}

func pod(w *testcluster.Cluster, name string) *corev1.Pod {
	w.T.Helper()
	p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", name)
	if err != nil {
		w.T.Fatal(err)
	}
	return p
}

func storedClaim(w *testcluster.Cluster, name string) *corev1.PersistentVolumeClaim {
	w.T.Helper()
	c, err := client.Get[*corev1.PersistentVolumeClaim](w.Ctx, w.Admin, "default", name)
	if err != nil {
		w.T.Fatal(err)
	}
	return c
}

// confirmDeletion deletes a pod without a grace period, as its agent does when the containers have ended.
func confirmDeletion(w *testcluster.Cluster, name string, uid types.UID) {
	w.T.Helper()
	now := int64(0)
	if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", name, metav1.DeleteOptions{GracePeriodSeconds: &now,
		Preconditions: &metav1.Preconditions{UID: &uid}}); err != nil {
		w.T.Fatal(err)
	}
}

// awaitTerminating waits until a pod has a deletion timestamp.
func awaitTerminating(w *testcluster.Cluster, name string) {
	w.T.Helper()
	w.Eventually(name+" is terminating", func() error {
		p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", name)
		if err != nil || p.DeletionTimestamp == nil {
			return fmt.Errorf("not yet: %v", err)
		}
		return nil
	})
}

// awaitSuccessor waits until a pod of the name exists whose UID differs from uid.
func awaitSuccessor(w *testcluster.Cluster, name string, uid types.UID) {
	w.T.Helper()
	w.Eventually("another "+name, func() error {
		p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", name)
		if err != nil || p.UID == uid {
			return fmt.Errorf("not yet: %v", err)
		}
		return nil
	})
}

// A set with whenScaled: Delete is scaled down, and up again while the condemned pod terminates. The claim
// names that pod as its owner, so the garbage collector deletes it. No pod is created before the stale claim
// is gone. F14
func TestStatefulSetWaitsForStaleClaim(t *testing.T) {
	for round := range 20 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
				w.CreateObject(statefulRetaining(retainClaims, deleteClaims))
				w.AwaitStatefulSet("db", 2)
				before, claim := pod(w, "db-1"), storedClaim(w, "data-db-1")
				w.Nodes.Mark(w.Nodes.Dead, before.Spec.NodeName, true)
				scaleStateful(w, "db", 1)
				awaitTerminating(w, "db-1")
				scaleStateful(w, "db", 2)
				time.Sleep(time.Second) // virtual
				w.Nodes.Mark(w.Nodes.Dead, before.Spec.NodeName, false)
				confirmDeletion(w, "db-1", before.UID)
				awaitSuccessor(w, "db-1", before.UID)
				time.Sleep(10 * time.Second) // virtual: all controllers are idle
				p, c := pod(w, "db-1"), storedClaim(w, "data-db-1")
				if c.DeletionTimestamp != nil && p.DeletionTimestamp == nil {
					t.Errorf("pod db-1 runs (%s) on claim data-db-1, which is being deleted with its data",
						p.Status.Phase)
				}
				if c.UID == claim.UID {
					t.Error("claim data-db-1 outlived the pod that it was condemned with")
				}
			})
		})
	}
}

// While the condemned pod terminates, the policy changes to Retain: the claim loses its reference to that
// pod and stays, with its data, for the next pod. F14
func TestStatefulSetKeepsClaimWhenPolicyBecomesRetain(t *testing.T) {
	policies := []appsv1.PodManagementPolicyType{appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement}
	for _, management := range policies {
		t.Run(string(management), func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
				set := statefulRetaining(retainClaims, deleteClaims)
				set.Spec.PodManagementPolicy = management
				w.CreateObject(set)
				w.AwaitStatefulSet("db", 2)
				before, claim := pod(w, "db-1"), storedClaim(w, "data-db-1")
				w.Nodes.Mark(w.Nodes.Dead, before.Spec.NodeName, true)
				scaleStateful(w, "db", 1)
				awaitTerminating(w, "db-1")
				if refs := storedClaim(w, "data-db-1").OwnerReferences; len(refs) != 1 || refs[0].UID != before.UID {
					t.Fatalf("owners of the condemned pod's claim: %v", refs)
				}
				testcluster.Update(w, "db", func(s *appsv1.StatefulSet) {
					n := int32(2)
					s.Spec.Replicas, s.Spec.PersistentVolumeClaimRetentionPolicy.WhenScaled = &n, retainClaims
				})
				w.Eventually("the claim has no owner", func() error {
					if refs := storedClaim(w, "data-db-1").OwnerReferences; len(refs) > 0 {
						return fmt.Errorf("owners %v", refs)
					}
					return nil
				})
				w.Nodes.Mark(w.Nodes.Dead, before.Spec.NodeName, false)
				confirmDeletion(w, "db-1", before.UID)
				w.AwaitStatefulSet("db", 2)
				time.Sleep(time.Minute) // virtual
				if c := storedClaim(w, "data-db-1"); c.UID != claim.UID || c.DeletionTimestamp != nil {
					t.Errorf("claim %s, deleted at %v, want the first one, %s", c.UID, c.DeletionTimestamp, claim.UID)
				}
			})
		})
	}
}

// A set that is deleted and created again at once with whenDeleted: Delete gets new claims: those of the
// previous set are deleted, so no pod starts on them. F14
func TestStatefulSetWaitsForClaimsOfPreviousSet(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		w.CreateObject(statefulRetaining(deleteClaims, retainClaims))
		w.AwaitStatefulSet("db", 2)
		claim := storedClaim(w, "data-db-0")
		if err := client.Delete[*appsv1.StatefulSet](w.Ctx, w.Admin, "default", "db", metav1.DeleteOptions{}); err !=
			nil {
			t.Fatal(err)
		}
		w.CreateObject(statefulRetaining(retainClaims, retainClaims))
		w.AwaitStatefulSet("db", 2)
		time.Sleep(time.Minute) // virtual
		if c := storedClaim(w, "data-db-0"); c.UID == claim.UID || c.DeletionTimestamp != nil {
			t.Errorf("claim %s, deleted at %v, want another than %s, of the previous set", c.UID,
				c.DeletionTimestamp, claim.UID)
		}
	})
}

// A set with whenScaled: Delete is scaled down while its last pod is already terminating, because of a drain
// or an eviction: the claim is deleted with the pod. F14
func TestStatefulSetReleasesClaimOfTerminatingPod(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		w.CreateObject(statefulRetaining(retainClaims, deleteClaims))
		w.AwaitStatefulSet("db", 2)
		p := pod(w, "db-1")
		w.Nodes.Mark(w.Nodes.Dead, p.Spec.NodeName, true)
		if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", "db-1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // virtual
		scaleStateful(w, "db", 1)
		time.Sleep(time.Second)
		confirmDeletion(w, "db-1", p.UID)
		time.Sleep(20 * time.Minute) // resyncs included
		if got := strings.Join(claims(w), " "); got != "data-db-0" {
			t.Errorf("claims %s, want data-db-0", got)
		}
	})
}

// An ordered set that is scaled down removes one pod at a time, but the claims of all condemned pods name
// them as owners at once: a pod that another client deletes takes its claim along. F14
func TestStatefulSetReleasesClaimsOfAllCondemnedPods(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		set := statefulRetaining(retainClaims, deleteClaims)
		n := int32(4)
		set.Spec.Replicas = &n
		w.CreateObject(set)
		w.AwaitStatefulSet("db", 4)
		last := pod(w, "db-3")
		w.Nodes.Mark(w.Nodes.Dead, last.Spec.NodeName, true)
		scaleStateful(w, "db", 1)
		awaitTerminating(w, "db-3")
		w.Eventually("the claims name their pods", func() error {
			for _, name := range []string{"db-1", "db-2", "db-3"} {
				if refs := storedClaim(w, "data-"+name).OwnerReferences; len(refs) != 1 || refs[0].Name != name {
					return fmt.Errorf("owners of claim data-%s: %v", name, refs)
				}
			}
			return nil
		})
		if p := pod(w, "db-1"); p.DeletionTimestamp != nil {
			t.Error("db-1 is terminating before db-3 is gone")
		}
	})
}

// The flag controller of a claim's owner reference is set again when another client removed it. F14
func TestStatefulSetSetsControllerOfClaimAgain(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		w.CreateObject(statefulRetaining(deleteClaims, retainClaims))
		w.AwaitStatefulSet("db", 2)
		for _, flag := range []*bool{nil, new(bool)} {
			c := storedClaim(w, "data-db-0").DeepCopy()
			c.OwnerReferences[0].Controller = flag
			if _, err := client.Update(w.Ctx, w.Admin, c); err != nil {
				t.Fatal(err)
			}
			w.Eventually("the set controls the claim", func() error {
				c := storedClaim(w, "data-db-0")
				if ref := metav1.GetControllerOf(c); ref == nil || ref.Name != "db" || len(c.OwnerReferences) != 1 {
					return fmt.Errorf("owners %v", c.OwnerReferences)
				}
				return nil
			})
		}
	})
}
