package endpointslice_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/endpointslice"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// F116: Endpoints that a user manages for a Service without a selector are mirrored to slices. The
// slices follow changes of the Endpoints, the creation and deletion of the Service, a selector, and
// the label that disables mirroring.
func TestEndpointsKeptByHand(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		become := func(step, want string) {
			t.Helper()
			w.Eventually(step, func() error {
				list, err := client.List[*discoveryv1.EndpointSlice](w.Ctx, w.Admin, "default", metav1.ListOptions{
					LabelSelector: discoveryv1.LabelServiceName + "=db," + discoveryv1.LabelManagedBy + "=" +
						endpointslice.MirroredBy})
				if err != nil {
					return err
				}
				var got []string
				for _, s := range list {
					for _, e := range s.Endpoints {
						got = append(got, fmt.Sprint(e.Addresses[0], ":", *s.Ports[0].Port))
					}
				}
				if slices.Sort(got); strings.Join(got, " ") != want {
					return fmt.Errorf("the slices say %q, want %q", got, want)
				}
				return nil
			})
		}
		change := func(f func(e *corev1.Endpoints)) { t.Helper(); testcluster.Update(w, "db", f) }
		w.CreateObject(&corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "db"},
			Subsets: []corev1.EndpointSubset{{
				Addresses: []corev1.EndpointAddress{{IP: "192.0.2.1"}, {IP: "192.0.2.2"}},
				Ports:     []corev1.EndpointPort{{Port: 5432, Protocol: corev1.ProtocolTCP}}}}})
		w.CreateObject(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "db"},
			Spec: corev1.ServiceSpec{ClusterIP: "10.96.7.7",
				Ports: []corev1.ServicePort{{Port: 5432, Protocol: corev1.ProtocolTCP}}}})
		become("a Service for them", "192.0.2.1:5432 192.0.2.2:5432")
		change(func(e *corev1.Endpoints) { e.Subsets[0].Addresses = e.Subsets[0].Addresses[1:] })
		become("one less", "192.0.2.2:5432")
		change(func(e *corev1.Endpoints) { e.Labels = map[string]string{discoveryv1.LabelSkipMirror: "true"} })
		become("not to be mirrored", "")
		change(func(e *corev1.Endpoints) { e.Labels = nil })
		become("to be mirrored again", "192.0.2.2:5432")
		if err := client.Delete[*corev1.Service](w.Ctx, w.Admin, "default", "db", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		become("without a Service", "")
	})
}
