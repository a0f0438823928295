package garbagecollector_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/virtual"
)

// F71: a reference to an owner in another namespace is reported by an Event of the dependent. A
// dependent in a namespace is collected; a cluster-scoped dependent stays. The absence of a deleted
// owner is not reported.
func TestOwnerInAnotherNamespaceIsReported(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := ofEveryKind(t)
		w.CreateObject(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}})
		owner := configMap(w, "owner", nil)
		refs := []metav1.OwnerReference{*ofConfigMap(owner)}
		gone := []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "never", UID: "u"}}
		time.Sleep(time.Second) // virtual: the caches show the owner
		w.CreateObject(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "dependent",
			OwnerReferences: refs}})
		w.CreateObject(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "orphan",
			OwnerReferences: gone}})
		w.CreateObject(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "wide", OwnerReferences: refs}})
		time.Sleep(10 * time.Minute) // virtual
		events, err := client.List[*corev1.Event](w.Ctx, w.Admin, "", metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for _, e := range events {
			got[e.InvolvedObject.Kind+"/"+e.InvolvedObject.Name] = fmt.Sprint(e.Namespace, " ", e.Type, " ", e.Reason,
				" ", e.Count, ": ", e.Message)
		}
		message := func(ns, in string) string {
			return fmt.Sprintf("%s Warning OwnerRefInvalidNamespace 1: ownerRef [v1/ConfigMap, namespace: %s, name: "+
				"owner, uid: %s] does not exist in namespace %q",
				ns, in, owner.UID, in)
		}
		want := map[string]string{"ConfigMap/dependent": message("other", "other"),
			"ClusterRole/wide": message("default", "")}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("events:\n%v\nwant:\n%v", got, want)
		}
		if _, err := client.Get[*rbacv1.ClusterRole](w.Ctx, w.Admin, "", "wide"); err != nil {
			t.Errorf("the cluster-scoped dependent: %v", err)
		}
		if _, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "other", "dependent"); err == nil {
			t.Error("the dependent in another namespace was not collected")
		}
	})
}
