package services_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// The health check port of a Service is reserved like any node port: no other Service gets it.
func TestHealthCheckNodePortIsReserved(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	services := r.Admin().CoreV1().Services("default")
	balancer := func(name string, health int32) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
			HealthCheckNodePort: health,
			Ports:               []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(80)}},
		}}
	}
	a, err := services.Create(ctx, balancer("a", 30100), metav1.CreateOptions{})
	if err != nil || a.Spec.HealthCheckNodePort != 30100 {
		t.Fatalf("%v %+v", err, a)
	}
	if _, err := services.Create(ctx, balancer("b", 30100), metav1.CreateOptions{}); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(),
			"spec.healthCheckNodePort: Invalid value: \"30100\": provided port is already allocated") {
		t.Errorf("a second health check at the port: %v", err)
	}
	taken := balancer("c", 0)
	taken.Spec.Ports[0].NodePort = 30100
	if _, err := services.Create(ctx, taken, metav1.CreateOptions{}); !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "spec.ports[0].nodePort") {
		t.Errorf("a node port of the same number: %v", err)
	}
	if err := services.Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := services.Create(ctx, balancer("b", 30100), metav1.CreateOptions{}); err != nil {
		t.Errorf("after its holder was deleted: %v", err)
	}
}

// The commit of a Service reserves the health check port that was picked for it by key, and the
// commit that no longer needs the port releases it.
func TestPickedHealthCheckNodePortIsReservedByKey(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	services := r.Admin().CoreV1().Services("default")
	svc, err := services.Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
		Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(80)}},
	}}, metav1.CreateOptions{})
	if err != nil || svc.Spec.HealthCheckNodePort == 0 {
		t.Fatalf("%v %+v", err, svc)
	}
	value := fmt.Sprintf("TCP-%d", svc.Spec.HealthCheckNodePort)
	r.Await(func() bool { return r.Registry.Reserved("nodeports", value) })
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	if _, err := services.Update(ctx, svc, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	r.Await(func() bool { return !r.Registry.Reserved("nodeports", value) })
}
