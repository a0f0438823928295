package controllers_test

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
	"keelson.dev/keelson/internal/virtual"
)

const (
	retainClaims = appsv1.RetainPersistentVolumeClaimRetentionPolicyType
	deleteClaims = appsv1.DeletePersistentVolumeClaimRetentionPolicyType
)

// statefulRetaining returns a StatefulSet db of two pods with a claim retention policy.
func statefulRetaining(deleted, scaled appsv1.PersistentVolumeClaimRetentionPolicyType) *appsv1.StatefulSet {
	set := stateful("db", 2, "db:1")
	set.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{
		WhenDeleted: deleted, WhenScaled: scaled}
	return set
}

func (w *world) scaleStateful(name string, n int32) {
	w.t.Helper()
	update(w, name, func(s *appsv1.StatefulSet) { s.Spec.Replicas = &n })
}

func (w *world) pod(name string) *corev1.Pod {
	w.t.Helper()
	p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", name)
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

func (w *world) claim(name string) *corev1.PersistentVolumeClaim {
	w.t.Helper()
	c, err := client.Get[*corev1.PersistentVolumeClaim](w.ctx, w.admin, "default", name)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// confirmDeletion deletes a pod without a grace period, as its agent does when the containers have ended.
func (w *world) confirmDeletion(name string, uid types.UID) {
	w.t.Helper()
	now := int64(0)
	if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", name, metav1.DeleteOptions{GracePeriodSeconds: &now,
		Preconditions: &metav1.Preconditions{UID: &uid}}); err != nil {
		w.t.Fatal(err)
	}
}

// awaitTerminating waits until a pod has a deletion timestamp.
func (w *world) awaitTerminating(name string) {
	w.t.Helper()
	w.eventually(name+" is terminating", func() error {
		p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", name)
		if err != nil || p.DeletionTimestamp == nil {
			return fmt.Errorf("not yet: %v", err)
		}
		return nil
	})
}

// awaitSuccessor waits until a pod of the name exists whose UID differs from uid.
func (w *world) awaitSuccessor(name string, uid types.UID) {
	w.t.Helper()
	w.eventually("another "+name, func() error {
		p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", name)
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
				w := start(t, options{quiet: true})
				w.create(statefulRetaining(retainClaims, deleteClaims))
				w.statefulDone("db", 2)
				before, claim := w.pod("db-1"), w.claim("data-db-1")
				w.nodes.set(w.nodes.dead, before.Spec.NodeName, true)
				w.scaleStateful("db", 1)
				w.awaitTerminating("db-1")
				w.scaleStateful("db", 2)
				time.Sleep(time.Second) // virtual
				w.nodes.set(w.nodes.dead, before.Spec.NodeName, false)
				w.confirmDeletion("db-1", before.UID)
				w.awaitSuccessor("db-1", before.UID)
				time.Sleep(10 * time.Second) // virtual: all controllers are idle
				p, c := w.pod("db-1"), w.claim("data-db-1")
				if c.DeletionTimestamp != nil && p.DeletionTimestamp == nil {
					t.Errorf("pod db-1 runs (%s) on claim data-db-1, which is being deleted with its data", p.Status.Phase)
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
				w := start(t, options{quiet: true})
				set := statefulRetaining(retainClaims, deleteClaims)
				set.Spec.PodManagementPolicy = management
				w.create(set)
				w.statefulDone("db", 2)
				before, claim := w.pod("db-1"), w.claim("data-db-1")
				w.nodes.set(w.nodes.dead, before.Spec.NodeName, true)
				w.scaleStateful("db", 1)
				w.awaitTerminating("db-1")
				if refs := w.claim("data-db-1").OwnerReferences; len(refs) != 1 || refs[0].UID != before.UID {
					t.Fatalf("owners of the condemned pod's claim: %v", refs)
				}
				update(w, "db", func(s *appsv1.StatefulSet) {
					n := int32(2)
					s.Spec.Replicas, s.Spec.PersistentVolumeClaimRetentionPolicy.WhenScaled = &n, retainClaims
				})
				w.eventually("the claim has no owner", func() error {
					if refs := w.claim("data-db-1").OwnerReferences; len(refs) > 0 {
						return fmt.Errorf("owners %v", refs)
					}
					return nil
				})
				w.nodes.set(w.nodes.dead, before.Spec.NodeName, false)
				w.confirmDeletion("db-1", before.UID)
				w.statefulDone("db", 2)
				time.Sleep(time.Minute) // virtual
				if c := w.claim("data-db-1"); c.UID != claim.UID || c.DeletionTimestamp != nil {
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
		w := start(t, options{quiet: true})
		w.create(statefulRetaining(deleteClaims, retainClaims))
		w.statefulDone("db", 2)
		claim := w.claim("data-db-0")
		if err := client.Delete[*appsv1.StatefulSet](w.ctx, w.admin, "default", "db", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.create(statefulRetaining(retainClaims, retainClaims))
		w.statefulDone("db", 2)
		time.Sleep(time.Minute) // virtual
		if c := w.claim("data-db-0"); c.UID == claim.UID || c.DeletionTimestamp != nil {
			t.Errorf("claim %s, deleted at %v, want another than %s, of the previous set", c.UID, c.DeletionTimestamp, claim.UID)
		}
	})
}

// A set with whenScaled: Delete is scaled down while its last pod is already terminating, because of a drain
// or an eviction: the claim is deleted with the pod. F14
func TestStatefulSetReleasesClaimOfTerminatingPod(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		w.create(statefulRetaining(retainClaims, deleteClaims))
		w.statefulDone("db", 2)
		p := w.pod("db-1")
		w.nodes.set(w.nodes.dead, p.Spec.NodeName, true)
		if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", "db-1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // virtual
		w.scaleStateful("db", 1)
		time.Sleep(time.Second)
		w.confirmDeletion("db-1", p.UID)
		time.Sleep(20 * time.Minute) // resyncs included
		if got := strings.Join(w.claims(), " "); got != "data-db-0" {
			t.Errorf("claims %s, want data-db-0", got)
		}
	})
}

// An ordered set that is scaled down removes one pod at a time, but the claims of all condemned pods name
// them as owners at once: a pod that another client deletes takes its claim along. F14
func TestStatefulSetReleasesClaimsOfAllCondemnedPods(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		set := statefulRetaining(retainClaims, deleteClaims)
		n := int32(4)
		set.Spec.Replicas = &n
		w.create(set)
		w.statefulDone("db", 4)
		last := w.pod("db-3")
		w.nodes.set(w.nodes.dead, last.Spec.NodeName, true)
		w.scaleStateful("db", 1)
		w.awaitTerminating("db-3")
		w.eventually("the claims name their pods", func() error {
			for _, name := range []string{"db-1", "db-2", "db-3"} {
				if refs := w.claim("data-" + name).OwnerReferences; len(refs) != 1 || refs[0].Name != name {
					return fmt.Errorf("owners of claim data-%s: %v", name, refs)
				}
			}
			return nil
		})
		if p := w.pod("db-1"); p.DeletionTimestamp != nil {
			t.Error("db-1 is terminating before db-3 is gone")
		}
	})
}

// The flag controller of a claim's owner reference is set again when another client removed it. F14
func TestStatefulSetSetsControllerOfClaimAgain(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		w.create(statefulRetaining(deleteClaims, retainClaims))
		w.statefulDone("db", 2)
		for _, flag := range []*bool{nil, new(bool)} {
			c := w.claim("data-db-0").DeepCopy()
			c.OwnerReferences[0].Controller = flag
			if _, err := client.Update(w.ctx, w.admin, c); err != nil {
				t.Fatal(err)
			}
			w.eventually("the set controls the claim", func() error {
				c := w.claim("data-db-0")
				if ref := metav1.GetControllerOf(c); ref == nil || ref.Name != "db" || len(c.OwnerReferences) != 1 {
					return fmt.Errorf("owners %v", c.OwnerReferences)
				}
				return nil
			})
		}
	})
}
