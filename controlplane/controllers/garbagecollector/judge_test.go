package garbagecollector

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

func owners(states ...OwnerState) (out []Owner) {
	for i, s := range states {
		out = append(out, Owner{Ref: metav1.OwnerReference{UID: types.UID(fmt.Sprint(i))}, State: s})
	}
	return out
}

// F71 P12
func TestJudge(t *testing.T) {
	for _, c := range []struct {
		name       string
		finalizers []string
		owners     []Owner
		dependents bool
		want       string
	}{
		{"no owner", nil, nil, false, "[] "},
		{"its owner exists", nil, owners(Solid), false, "[] "},
		{"its owner is gone", nil, owners(Absent), true, "[] Background"},
		{"all owners are gone", nil, owners(Absent, Absent), false, "[] Background"},
		{"one of two is gone", nil, owners(Solid, Absent), false, "[1] "},
		{"one of two waits for its dependents", nil, owners(Waiting, Solid), true, "[0] "},
		{"the owner waits: a leaf", nil, owners(Waiting), false, "[] Background"},
		{"the owner waits: a branch", nil, owners(Waiting), true, "[] Foreground"},
		{"one waits, one is gone", nil, owners(Waiting, Absent), true, "[] Foreground"},
		{"it wants its own dependents orphaned", []string{metav1.FinalizerOrphanDependents}, owners(Absent), true, "[] Orphan"},
		{"it waits for its own dependents", []string{metav1.FinalizerDeleteDependents}, owners(Absent), true, "[] Foreground"},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := Judge(&metav1.ObjectMeta{Finalizers: c.finalizers}, c.owners, func() bool { return c.dependents })
			if got := fmt.Sprint(v.Detach, " ", v.Delete); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

func TestBlocking(t *testing.T) {
	yes, no := true, false
	object := func(uid types.UID, block *bool, owner types.UID) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{UID: uid,
			OwnerReferences: []metav1.OwnerReference{{UID: owner, BlockOwnerDeletion: block}}}}
	}
	owner := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{UID: "o"}}
	if n := Blocking(owner, []api.Object{object("a", &yes, "o"), object("b", &no, "o"), object("c", nil, "o")}); n != 1 {
		t.Errorf("%d block, want 1", n)
	}
	// A circle: each waits for the other.
	waiting := object("a", &yes, "o")
	waiting.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	waiting.Finalizers = []string{metav1.FinalizerDeleteDependents}
	circle := object("o", &yes, "a")
	if n := Blocking(circle, []api.Object{waiting}); n != 0 {
		t.Errorf("a circle blocks itself: %d", n)
	}
}
