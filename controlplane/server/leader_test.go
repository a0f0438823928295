package server_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/server/servertest"
)

// A deleted Service default/kubernetes and its endpoints are created again, while the other parts
// of the leader keep running.
func TestKubernetesServiceComesBack(t *testing.T) {
	p := newPlane(t, 1, nil)
	ctx := context.Background()
	cs := p.Client("cp1")
	checkService := func() error {
		svc, err := cs.CoreV1().Services("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if svc.Spec.ClusterIP != "10.96.0.1" {
			return fmt.Errorf("the ClusterIP is %s", svc.Spec.ClusterIP)
		}
		slice, err := cs.DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		if err == nil && len(slice.Endpoints) != 0 { // loopback addresses are not allowed in slices
			err = fmt.Errorf("%d endpoints", len(slice.Endpoints))
		}
		return err
	}
	for range 3 {
		servertest.Eventually(t, checkService)
		for _, err := range []error{
			cs.CoreV1().Services("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{}),
			cs.DiscoveryV1().EndpointSlices("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{}),
		} {
			if err != nil && !apierrors.IsNotFound(err) {
				t.Fatal(err)
			}
		}
		if _, err := cs.CoreV1().Services("default").Create(ctx,
			&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "thief"},
				Spec: v1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []v1.ServicePort{{Port: 1}}}},
			metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
			t.Errorf("the address of the API was allocated: %v", err)
		}
	}
	servertest.Eventually(t, checkService)
	var metrics string
	if err := p.Call("cp1", "GET", "/metrics", nil, &metrics); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(metrics) {
		if strings.HasPrefix(line, "keelson_leader_part_restarts_total{") &&
			!strings.Contains(line, `"kubernetes service"`) {
			t.Errorf("another part was restarted: %s", line)
		}
	}
	if text := p.Members["cp1"].Log.String(); strings.Count(text, "msg=leading replica=cp1 term=") != 1 {
		t.Errorf("the leader's work was started %d times", strings.Count(text, "msg=leading replica=cp1 term="))
	}
}
