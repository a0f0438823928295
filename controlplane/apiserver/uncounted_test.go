package apiserver_test

import (
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// F38: Kubernetes keeps no metadata.generation for some kinds that have a spec and a status.
func TestKindsWithoutGeneration(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	once := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	r.Must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Generation: 4}})
	r.Must(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns"}})
	r.Must(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v", Generation: 4},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes: once, Capacity: corev1.ResourceList{corev1.ResourceStorage: apiservertest.Quantity("1Gi")},
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/a"}}}})
	r.Must(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c"},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: once,
			Resources: corev1.VolumeResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceStorage: apiservertest.Quantity("1Gi")}}}})
	r.Must(&corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "q"}})
	admin := r.AdminHTTP()
	for _, c := range []struct{ path, patch string }{
		{"/api/v1/nodes/n",
			`{"metadata":{"generation":7,"finalizers":["example.com/hold"]},"spec":{"unschedulable":true}}`},
		{"/api/v1/nodes/n/status", `{"metadata":{"generation":7},"status":{"phase":"Running"}}`},
		{"/api/v1/persistentvolumes/v",
			`{"metadata":{"finalizers":["example.com/hold"]},"spec":{"storageClassName":"fast"}}`},
		{"/api/v1/persistentvolumes/v/status", `{"status":{"message":"a"}}`},
		{"/api/v1/namespaces/default/persistentvolumeclaims/c",
			`{"metadata":{"finalizers":["example.com/hold"]},"spec":{"volumeName":"v"}}`},
		{"/api/v1/namespaces/default/resourcequotas/q",
			`{"metadata":{"finalizers":["example.com/hold"]},"spec":{"hard":{"pods":"4"}}}`},
		{"/api/v1/namespaces/ns", `{"metadata":{"finalizers":["example.com/hold"],"labels":{"a":"b"}}}`},
	} {
		a := r.Call(admin, "PATCH", c.path, c.patch, "Content-Type", "application/merge-patch+json")
		if a.Code != http.StatusOK || strings.Contains(a.Body, `"generation"`) {
			t.Errorf("PATCH %s: %d %s", c.path, a.Code, a.Body)
		}
		if strings.HasSuffix(c.path, "/status") {
			continue
		}
		a = r.Call(admin, "DELETE", c.path, "")
		if a.Code/100 != 2 || strings.Contains(a.Body, `"generation"`) {
			t.Errorf("DELETE %s: %d %s", c.path, a.Code, a.Body)
		}
	}
}
