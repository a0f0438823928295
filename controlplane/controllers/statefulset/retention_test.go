package statefulset

import (
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// refsOf parses "Pod/db-1=uid" or, for a reference without controller: true, "Pod/db-1=uid?".
func refsOf(text string) (out []metav1.OwnerReference) {
	for word := range strings.FieldsSeq(text) {
		name, uid, _ := strings.Cut(word, "=")
		k, name, _ := strings.Cut(name, "/")
		uid, noController := strings.CutSuffix(uid, "?")
		version := "v1"
		if k == "StatefulSet" {
			version = "apps/v1"
		}
		r := metav1.OwnerReference{APIVersion: version, Kind: k, Name: name, UID: types.UID(uid)}
		if !noController {
			r.Controller = ptr.To(true)
		}
		out = append(out, r)
	}
	return out
}

func showRefs(refs []metav1.OwnerReference) string {
	var out []string
	for _, r := range refs {
		word := fmt.Sprintf("%s/%s=%s", r.Kind, r.Name, r.UID)
		if !ptr.Deref(r.Controller, false) {
			word += "?"
		}
		out = append(out, word)
	}
	return strings.Join(out, " ")
}

func retaining(deleted, scaled appsv1.PersistentVolumeClaimRetentionPolicyType) func(*appsv1.StatefulSet) {
	return func(s *appsv1.StatefulSet) {
		s.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{
			WhenDeleted: deleted, WhenScaled: scaled}
	}
}

// The owner references of a claim follow the retention policy for every set of references that it has. F14
func TestClaimOwners(t *testing.T) {
	const (
		keep = appsv1.RetainPersistentVolumeClaimRetentionPolicyType
		drop = appsv1.DeletePersistentVolumeClaimRetentionPolicyType
	)
	const other = "ConfigMap/cm=cm? "
	for _, c := range []struct {
		name            string
		deleted, scaled appsv1.PersistentVolumeClaimRetentionPolicyType
		condemned       bool
		have, want      string
		stale           bool
	}{
		{"retained claim gets no owner", keep, keep, true, "", "", false},
		{"owner without controller is kept", keep, keep, false, other, other, false},
		{"retained claim loses the set", keep, keep, false, other + "StatefulSet/db=set", other, false},
		{"retained claim loses its pod", keep, keep, false, "Pod/db-1=pod", "", false},
		{"retained claim loses a deleted pod", keep, keep, false, "Pod/db-1=gone", "", false},
		{"retained claim keeps a pod of another name", keep, keep, false, "Pod/web=web?", "Pod/web=web?", false},
		{"set owns the claim", drop, keep, false, "", "StatefulSet/db=set", false},
		{"set owns the claim of a condemned pod", drop, keep, true, "Pod/db-1=pod", "StatefulSet/db=set", false},
		{"set becomes controller again", drop, keep, false, "StatefulSet/db=set?", "StatefulSet/db=set", false},
		{"condemned pod owns the claim", keep, drop, true, "", "Pod/db-1=pod", false},
		{"condemned pod becomes controller again", keep, drop, true, "Pod/db-1=pod?", "Pod/db-1=pod", true},
		{"condemned pod replaces the set", drop, drop, true, "StatefulSet/db=set", "Pod/db-1=pod", false},
		{"condemned pod replaces a deleted pod", keep, drop, true, "Pod/db-1=gone", "Pod/db-1=pod", true},
		{"set replaces the pod that is no longer condemned", drop, drop, false, "Pod/db-1=pod",
			"StatefulSet/db=set", true},
		{"claim of a deleted set", drop, drop, false, "StatefulSet/db=gone", "StatefulSet/db=gone", true},
		{"claim of a deleted set, retained", keep, keep, false, "StatefulSet/db=gone?", "StatefulSet/db=gone?", true},
		{"claim of another controller", drop, drop, true, "Backup/b=b", "Backup/b=b", false},
		{"claim of two controllers", drop, keep, false, "StatefulSet/db=set? Backup/b=b", "Backup/b=b", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			set := statefulSet(3, retaining(c.deleted, c.scaled))
			claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{OwnerReferences: refsOf(c.have)}}
			var condemned *corev1.Pod
			if c.condemned {
				condemned = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "db-1", UID: "pod"}}
			}
			refs, changed := claimOwners(set, "db-1", condemned, claim)
			have, want := showRefs(refsOf(c.have)), showRefs(refsOf(c.want))
			if got := showRefs(refs); got != want || changed != (want != have) {
				t.Errorf("owners %q, changed %v, want %q", got, changed, want)
			}
			claim.OwnerReferences = refs
			if again, changed := claimOwners(set, "db-1", condemned, claim); changed {
				t.Errorf("the owners change again, to %q", showRefs(again))
			}
			claim.OwnerReferences = refsOf(c.have)
			if got := isStaleClaim(set, "db-1", claim); got != c.stale {
				t.Errorf("stale %v, want %v", got, c.stale)
			}
		})
	}
}
