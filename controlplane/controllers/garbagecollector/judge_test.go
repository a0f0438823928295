package garbagecollector

import (
	"fmt"
	"testing"

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

func uids(refs []metav1.OwnerReference) (out []types.UID) {
	for _, r := range refs {
		out = append(out, r.UID)
	}
	return out
}

// F71
func TestJudge(t *testing.T) {
	for _, c := range []struct {
		name       string
		finalizers []string
		owners     []Owner
		dependents bool
		circle     bool
		want       string
	}{
		{"no owner", nil, nil, false, false, "[] "},
		{"its owner exists", nil, owners(Solid), false, false, "[] "},
		{"its owner is gone", nil, owners(Absent), true, false, "[] Background"},
		{"all owners are gone", nil, owners(Absent, Absent), false, false, "[] Background"},
		{"one of two is gone", nil, owners(Solid, Absent), false, false, "[1] "},
		{"one of two waits for its dependents", nil, owners(Waiting, Solid), true, false, "[0] "},
		{"the owner waits: a leaf", nil, owners(Waiting), false, false, "[] Background"},
		{"the owner waits: a branch", nil, owners(Waiting), true, false, "[] Foreground"},
		{"one waits, one is gone", nil, owners(Waiting, Absent), true, false, "[] Foreground"},
		{"its owner is gone, another holds it only in a circle", nil, owners(Solid, Absent), true, true,
			"[] Background"},
		{"its owner waits, another holds it only in a circle", nil, owners(Solid, Waiting), true, true,
			"[] Foreground"},
		{"it wants its own dependents orphaned", []string{metav1.FinalizerOrphanDependents}, owners(Absent), true,
			false, "[] Orphan"},
		{"it waits for its own dependents", []string{metav1.FinalizerDeleteDependents}, owners(Absent), true, false,
			"[] Foreground"},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := Judge(&metav1.ObjectMeta{Finalizers: c.finalizers}, c.owners, !c.circle, func() bool {
				return c.dependents
			})
			if got := fmt.Sprint(uids(v.Detach), " ", v.Delete); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

func TestHoldsUp(t *testing.T) {
	yes, no := true, false
	k := &api.Kind{GVK: corev1.SchemeGroupVersion.WithKind("ConfigMap"), Namespaced: true}
	owner := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "o", UID: "o"}}
	for _, c := range []struct {
		why, namespace, version, kind, name string
		block                               *bool
		want                                bool
	}{
		{"it asks for it", "a", "v1", "ConfigMap", "o", &yes, true},
		{"it does not ask", "a", "v1", "ConfigMap", "o", &no, false},
		{"it does not say", "a", "v1", "ConfigMap", "o", nil, false},
		{"another namespace", "b", "v1", "ConfigMap", "o", &yes, false},
		{"the UID under another name", "a", "v1", "ConfigMap", "p", &yes, false},
		{"the UID under another kind", "a", "v1", "Secret", "o", &yes, false},
		{"the UID under another group", "a", "example.com/v1", "ConfigMap", "o", &yes, false},
	} {
		d := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, UID: "d",
			OwnerReferences: []metav1.OwnerReference{
				{APIVersion: c.version, Kind: c.kind, Name: c.name, UID: "o", BlockOwnerDeletion: c.block}}}}
		if got := holdsUp(d, owner, k); got != c.want {
			t.Errorf("%s: %v", c.why, got)
		}
	}
}
