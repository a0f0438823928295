package why

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestIngresses(t *testing.T) {
	of := func(class string) *networkingv1.Ingress {
		i := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web",
			CreationTimestamp: ago(0)}, Spec: networkingv1.IngressSpec{
			TLS: []networkingv1.IngressTLS{{Hosts: []string{"a.example"}, SecretName: "web-tls"}},
			DefaultBackend: &networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{
				Name: "front", Port: networkingv1.ServiceBackendPort{Number: 80}}}}}
		if class != "" {
			i.Spec.IngressClassName = &class
		}
		return i
	}
	classes := []networkingv1.IngressClass{
		{ObjectMeta: metav1.ObjectMeta{Name: "own"},
			Spec: networkingv1.IngressClassSpec{Controller: "keelson.dev/ingress"}},
		{ObjectMeta: metav1.ObjectMeta{Name: "other"},
			Spec: networkingv1.IngressClassSpec{Controller: "example.com/ingress"}},
	}
	front := corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "front"},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	transcript(t, "ingresses", []subject{
		{"no class", World{Route: RouteObjects{Classes: classes}}, of("")},
		{"a class that is not there", World{Route: RouteObjects{Classes: classes}}, of("lost")},
		{"another controller's", World{Route: RouteObjects{Classes: classes}}, of("other")},
		{"no Service, no Secret, no address", World{Route: RouteObjects{Classes: classes}}, of("own")},
		{"no endpoint; Secrets may not be read",
			World{Route: RouteObjects{Classes: classes, Services: []corev1.Service{front}}, Unread: []string{Secrets}},
			of("own")},
		{"classes may not be read", World{Unread: []string{Classes}}, of("own")},
	})
}
