package server

import (
	"context"
	"encoding/json"
	"fmt"
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
)

// asNode returns a client of a replica with the certificate of a node.
func (p *plane) asNode(replica, node string) *kubernetes.Clientset {
	p.t.Helper()
	issued, err := p.ca.CA.Issue(pki.Client(api.NodeUserPrefix+node, api.GroupNodes), time.Now())
	if err != nil {
		p.t.Fatal(err)
	}
	cfg := rest.AnonymousClientConfig(p.rest(replica))
	cfg.CertData, cfg.KeyData = issued.CertPEM, issued.KeyPEM
	return mustClient(p.t, cfg)
}

// statusPatch is a merge patch of a status.
func statusPatch(t *testing.T, status any) []byte {
	t.Helper()
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		t.Fatal(err)
	}
	return patch
}

// Two nodes with other network configurations report one address for their pods, or as their own, at the same moment and
// at two replicas. One report is accepted and the other is refused.
func TestOneAddressReportedAtTwoReplicas(t *testing.T) {
	const pods, machines = 40, 20
	p := newPlane(t, 3, nil)
	admin, ctx := p.client("cp1"), context.Background()
	if _, err := admin.CoreV1().ServiceAccounts("default").Create(ctx, &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
		metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	node := func(name string) {
		t.Helper()
		if _, err := admin.CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Annotations: map[string]string{podaddress.NetworkAnnotation: podaddress.ForeignNetwork}}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	clients := map[string]*kubernetes.Clientset{}
	for name, replica := range map[string]string{"a": "cp1", "b": "cp2"} {
		node(name)
		clients[name] = p.asNode(replica, name)
		for i := range pods {
			if _, err := admin.CoreV1().Pods("default").Create(ctx, &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(name, i)},
				Spec: v1.PodSpec{NodeName: name, Containers: []v1.Container{{Name: "c", Image: "i"}}}}, metav1.CreateOptions{}); err != nil {
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
		eventually(t, func() error {
			_, err := clients[name].CoreV1().Pods("default").Patch(ctx, fmt.Sprint(name, pods-1), types.MergePatchType,
				statusPatch(t, v1.PodStatus{Phase: v1.PodPending}), metav1.PatchOptions{}, "status")
			return err
		})
	}
	for i := range pods {
		address := fmt.Sprintf("172.20.0.%d", 1+i)
		both(fmt.Sprintf("address %s of pods a%d and b%d", address, i, i), func(node string) error {
			_, err := clients[node].CoreV1().Pods("default").Patch(ctx, fmt.Sprint(node, i), types.MergePatchType,
				statusPatch(t, v1.PodStatus{Phase: v1.PodRunning, PodIP: address, PodIPs: []v1.PodIP{{IP: address}}}), metav1.PatchOptions{}, "status")
			return err
		})
	}
	for i := range machines {
		address := fmt.Sprintf("192.0.2.%d", 1+i)
		both("address "+address+" of the machines", func(node string) error {
			_, err := clients[node].CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, statusPatch(t, v1.NodeStatus{
				Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: address}}}), metav1.PatchOptions{}, "status")
			return err
		})
	}
}
