package garbagecollector_test

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// circle creates ConfigMap "local", Flunder "remote" and ConfigMap "last", each owned by the previous object, and "local"
// owned by "last" and by outer. All references block the deletion of their owner.
func circle(w *testcluster.Cluster, s *shelf, outer ...metav1.OwnerReference) {
	w.T.Helper()
	block := true
	first := configMap(w, "local", nil)
	toFirst := ofConfigMap(first)
	toFirst.BlockOwnerDeletion = &block
	toRemote := s.put("remote", nil, *toFirst)
	toLast := ofConfigMap(configMap(w, "last", &toRemote))
	toLast.BlockOwnerDeletion = &block
	whole := first.DeepCopy()
	whole.OwnerReferences = append([]metav1.OwnerReference{*toLast}, outer...)
	if _, err := client.Update(w.Ctx, w.Admin, whole); err != nil {
		w.T.Fatal(err)
	}
	time.Sleep(time.Minute) // virtual
}

// circleIs reports which members of the circle exist: "local", "remote", "last".
func circleIs(w *testcluster.Cluster, s *shelf) (out []string) {
	if hasConfigMap(w, "local") {
		out = append(out, "local")
	}
	if s.get("remote") != nil {
		out = append(out, "remote")
	}
	if hasConfigMap(w, "last") {
		out = append(out, "last")
	}
	return out
}

// P28, F71: a circle of owners that leads through an aggregated API is collected when a member is deleted, whichever
// member it is and whatever the propagation policy.
func TestCirclesThroughTwoAPIsAreCollected(t *testing.T) {
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground,
		metav1.DeletePropagationBackground} {
		for _, member := range []string{"local", "last", "remote"} {
			t.Run(string(policy)+"/"+member, func(t *testing.T) {
				virtual.Test(t, func(t *testing.T) {
					w, s := onShelf(t)
					circle(w, s)
					if got := circleIs(w, s); len(got) != 3 {
						t.Fatalf("before a member was deleted, only these exist: %v", got)
					}
					if member == "remote" {
						s.remove(t, "remote", policy)
					} else {
						deleteConfigMap(w, member, policy)
					}
					time.Sleep(10 * time.Minute) // virtual
					if got := circleIs(w, s); len(got) > 0 {
						t.Errorf("10 minutes after the deletion of %s these still exist: %v", member, got)
					}
				})
			})
		}
	}
}

// P28, F71: a member that is deleted in the foreground waits for a dependent of the circle that is no member.
func TestCirclesThroughTwoAPIsWaitForDependents(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, s := onShelf(t)
		circle(w, s)
		toRemote := metav1.OwnerReference{APIVersion: "wardle.example.com/v1alpha1", Kind: "Flunder", Name: "remote",
			UID: "u-remote"}
		block := true
		toRemote.BlockOwnerDeletion = &block
		s.put("held", []string{"example.com/hold"}, toRemote)
		time.Sleep(time.Minute) // virtual
		deleteConfigMap(w, "local", metav1.DeletePropagationForeground)
		time.Sleep(10 * time.Minute) // virtual
		if got := circleIs(w, s); len(got) != 3 {
			t.Fatalf("the circle did not wait for its dependent: only these exist: %v", got)
		}
		s.mu.Lock()
		delete(s.objects, flunderPath+"/held")
		s.mu.Unlock()
		time.Sleep(10 * time.Minute) // virtual
		if got := circleIs(w, s); len(got) > 0 {
			t.Errorf("after the last dependent these still exist: %v", got)
		}
	})
}

// P28, F71: a circle through two APIs is deleted after its last outside owner, and stays while the
// API server does not respond.
func TestCirclesThroughTwoAPIsGoWithTheirOuterOwner(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, s := onShelf(t)
		circle(w, s, *ofConfigMap(configMap(w, "outer", nil)))
		s.set(true)
		deleteConfigMap(w, "outer", metav1.DeletePropagationBackground)
		time.Sleep(10 * time.Minute) // virtual
		if got := circleIs(w, s); len(got) != 3 {
			t.Fatalf("a member was deleted while the server of another did not answer: only these exist: %v", got)
		}
		s.set(false)
		time.Sleep(30 * time.Minute) // virtual
		if got := circleIs(w, s); len(got) > 0 {
			t.Errorf("after the last outer owner these still exist: %v", got)
		}
	})
}

// P28, F71: an aggregated object whose other owner no longer exists is collected if only a circle
// holds it.
func TestAggregatedMembersGoWithTheirOuterOwner(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, s := onShelf(t)
		circle(w, s)
		toOuter := *ofConfigMap(configMap(w, "outer", nil))
		s.mu.Lock()
		remote := s.objects[flunderPath+"/remote"]
		remote.OwnerReferences = append(remote.OwnerReferences, toOuter)
		s.mu.Unlock()
		time.Sleep(10 * time.Minute) // virtual
		deleteConfigMap(w, "outer", metav1.DeletePropagationBackground)
		time.Sleep(10 * time.Minute) // virtual
		if got := circleIs(w, s); len(got) > 0 {
			t.Errorf("after the last outer owner these still exist: %v", got)
		}
	})
}

// remove deletes a flunder as a client does.
func (s *shelf) remove(t *testing.T, name string, policy metav1.DeletionPropagation) {
	t.Helper()
	o := s.get(name)
	body, err := json.Marshal(metav1.DeleteOptions{PropagationPolicy: &policy,
		Preconditions: &metav1.Preconditions{UID: &o.UID, ResourceVersion: &o.ResourceVersion}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Call(t.Context(), http.MethodDelete, flunderPath+"/"+name, nil, body); err != nil {
		t.Fatal(err)
	}
}
