package server

import (
	"context"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A deleted Service default/kubernetes comes back, and so do its endpoints, while the rest of the leader's work goes on.
func TestKubernetesServiceComesBack(t *testing.T) {
	p := newPlane(t, 1, nil)
	ctx := context.Background()
	cs := p.client("cp1")
	there := func() error {
		svc, err := cs.CoreV1().Services("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if svc.Spec.ClusterIP != "10.96.0.1" {
			return fmt.Errorf("its address is %s", svc.Spec.ClusterIP)
		}
		slice, err := cs.DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		if err == nil && len(slice.Endpoints) != 0 { // these replicas have loopback addresses, which no slice names
			err = fmt.Errorf("%d endpoints", len(slice.Endpoints))
		}
		return err
	}
	for range 3 {
		eventually(t, there)
		for _, err := range []error{
			cs.CoreV1().Services("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{}),
			cs.DiscoveryV1().EndpointSlices("default").Delete(ctx, "kubernetes", metav1.DeleteOptions{}),
		} {
			if err != nil && !apierrors.IsNotFound(err) {
				t.Fatal(err)
			}
		}
		if _, err := cs.CoreV1().Services("default").Create(ctx, &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "thief"},
			Spec: v1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []v1.ServicePort{{Port: 1}}}}, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
			t.Errorf("the address of the API was given away: %v", err)
		}
	}
	eventually(t, there)
	var metrics string
	if err := p.call("cp1", "GET", "/metrics", nil, &metrics); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(metrics) {
		if strings.HasPrefix(line, "keelson_leader_part_restarts_total{") && !strings.Contains(line, `"kubernetes service"`) {
			t.Errorf("something else was begun again: %s", line)
		}
	}
	if text := p.members["cp1"].log.String(); strings.Count(text, "msg=leading replica=cp1 term=") != 1 {
		t.Errorf("the leader's work was begun %d times", strings.Count(text, "msg=leading replica=cp1 term="))
	}
}
