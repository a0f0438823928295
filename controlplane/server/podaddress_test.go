package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// nodeClient returns a client of a replica with the certificate of a node.
func (p *plane) nodeClient(replica, node string) *kubernetes.Clientset {
	p.T.Helper()
	issued, err := p.Trust.CA.Issue(pki.Client(api.NodeUserPrefix+node, api.GroupNodes), time.Now())
	if err != nil {
		p.T.Fatal(err)
	}
	cfg := rest.AnonymousClientConfig(p.RESTConfig(replica))
	cfg.CertData, cfg.KeyData = issued.CertPEM, issued.KeyPEM
	return servertest.NewClient(p.T, cfg)
}

// statusPatch returns a merge patch of a status.
func statusPatch(t *testing.T, status any) []byte {
	t.Helper()
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		t.Fatal(err)
	}
	return patch
}

// Two nodes with other network configurations report one address for their pods, or as their own,
// at the same moment and at two replicas. One report is accepted and the other is refused.
func TestOneAddressReportedAtTwoReplicas(t *testing.T) {
	const pods, machines = 40, 20
	p := newPlane(t, 3, nil)
	admin, ctx := p.Client("cp1"), context.Background()
	if _, err := admin.CoreV1().ServiceAccounts("default").Create(ctx,
		&v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
		metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	node := func(name string) {
		t.Helper()
		if _, err := admin.CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Annotations: map[string]string{podaddress.NetworkAnnotation: podaddress.ForeignNetwork}}},
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	clients := map[string]*kubernetes.Clientset{}
	for name, replica := range map[string]string{"a": "cp1", "b": "cp2"} {
		node(name)
		clients[name] = p.nodeClient(replica, name)
		for i := range pods {
			if _, err := admin.CoreV1().Pods("default").Create(ctx,
				&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(name, i)},
					Spec: v1.PodSpec{NodeName: name, Containers: []v1.Container{{Name: "c", Image: "i"}}}},
				metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	// both runs one report of each node at the same moment.
	both := func(what string, report func(node string) error) {
		t.Helper()
		var errs [2]error
		var reports sync.WaitGroup
		began := make(chan struct{})
		for i, name := range []string{"a", "b"} {
			reports.Go(func() {
				<-began
				errs[i] = report(name)
			})
		}
		close(began)
		reports.Wait()
		refused := 0
		for _, err := range errs {
			if apierrors.IsForbidden(err) {
				refused++
			} else if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		if refused != 1 {
			t.Errorf("%s: %d of 2 reports were refused: %v", what, refused, errs)
		}
	}
	for _, name := range []string{"a", "b"} { // the authorizer of each replica knows the pods of its node
		servertest.Eventually(t, func() error {
			_, err := clients[name].CoreV1().Pods("default").Patch(ctx, fmt.Sprint(name, pods-1), types.MergePatchType,
				statusPatch(t, v1.PodStatus{Phase: v1.PodPending}), metav1.PatchOptions{}, "status")
			return err
		})
	}
	for i := range pods {
		address := fmt.Sprintf("172.20.0.%d", 1+i)
		both(fmt.Sprintf("address %s of pods a%d and b%d", address, i, i), func(node string) error {
			_, err := clients[node].CoreV1().Pods("default").Patch(ctx, fmt.Sprint(node, i), types.MergePatchType,
				statusPatch(t, v1.PodStatus{Phase: v1.PodRunning, PodIP: address, PodIPs: []v1.PodIP{{IP: address}}}),
				metav1.PatchOptions{}, "status")
			return err
		})
	}
	for i := range machines {
		address := fmt.Sprintf("192.0.2.%d", 1+i)
		both("address "+address+" of the machines", func(node string) error {
			_, err := clients[node].CoreV1().Nodes().Patch(ctx, node, types.MergePatchType,
				statusPatch(t, v1.NodeStatus{
					Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: address}}}),
				metav1.PatchOptions{}, "status")
			return err
		})
	}
}

// A refused report of an address leaves a Warning Event on the pod, or on the Node, that names the
// address and the reason. Repeated reports of a node leave few Events, and a dry run leaves none.
func TestEventsOfRefusedAddresses(t *testing.T) {
	p := newPlane(t, 1, nil)
	admin, ctx := p.Client("cp1"), context.Background()
	for name, cidr := range map[string]string{"a": "10.244.7.0/24", "b": "10.244.8.0/24"} {
		if _, err := admin.CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Annotations: map[string]string{podaddress.NetworkAnnotation: podaddress.OwnNetwork}},
			Spec: v1.NodeSpec{PodCIDR: cidr, PodCIDRs: []string{cidr}}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := admin.CoreV1().Pods("default").Create(ctx, &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: v1.PodSpec{NodeName: "a", Containers: []v1.Container{{Name: "c", Image: "i"}}}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	nodeA := p.nodeClient("cp1", "a")
	report := func(address string, o metav1.PatchOptions) error {
		_, err := nodeA.CoreV1().Pods("default").Patch(ctx, "web", types.MergePatchType,
			statusPatch(t, v1.PodStatus{PodIP: address, PodIPs: []v1.PodIP{{IP: address}}}), o, "status")
		return err
	}
	checkRefused := func(err error) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "cannot report address") {
			t.Fatalf("the report was not refused: %v", err)
		}
	}
	servertest.Eventually(t, func() error { // the authorizer knows the pod of the node
		if err := report("10.244.8.9", metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}); err == nil ||
			!strings.Contains(err.Error(), "cannot report address") {
			return fmt.Errorf("a dry run of a report: %w", err)
		}
		return nil
	})
	checkRefused(report("10.244.8.7", metav1.PatchOptions{}))
	_, err := nodeA.CoreV1().Nodes().Patch(ctx, "a", types.MergePatchType, statusPatch(t, v1.NodeStatus{
		Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "10.244.8.1"}}}),
		metav1.PatchOptions{}, "status")
	checkRefused(err)
	for i := range 100 {
		checkRefused(report(fmt.Sprintf("10.244.8.%d", 100+i/2), metav1.PatchOptions{}))
	}
	var all []string
	servertest.Eventually(t, func() error {
		list, err := admin.CoreV1().Events("default").List(ctx,
			metav1.ListOptions{FieldSelector: "reason=AddressRefused"})
		if err != nil {
			return err
		}
		all = nil
		for _, e := range list.Items {
			all = append(all, fmt.Sprintf("%s %s %s: %s", e.Type, e.InvolvedObject.Kind,
				e.InvolvedObject.Name, e.Message))
		}
		for _, want := range []string{
			`Warning Pod web: node "a" cannot report address 10.244.8.7 in status.podIPs of pod default/web: it is ` +
				`not in the podCIDRs of node a (10.244.7.0/24); report an address that the pod has`,
			`Warning Node a: node "a" cannot report address 10.244.8.1 in status.addresses: it is in the podCIDRs of ` +
				`node b; report the addresses of its own machine`,
		} {
			if !slices.Contains(all, want) {
				return fmt.Errorf("no Event %q in %q", want, all)
			}
		}
		return nil
	})
	if len(all) > 11 || slices.ContainsFunc(all, func(e string) bool { return strings.Contains(e, "10.244.8.9 ") }) {
		t.Errorf("%d Events: %q", len(all), all)
	}
}
