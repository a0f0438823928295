package clients

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/test/testenv"
)

// awaitCertificate waits until every pod of the servers presents a certificate.
func (s *webhookServers) awaitCertificate(cert []byte) {
	s.Helper()
	want, _ := pem.Decode(cert)
	pods, err := testenv.Client(s).CoreV1().Pods(s.ns).List(context.Background(),
		metav1.ListOptions{LabelSelector: "app=hooks"})
	if err != nil {
		s.Fatal(err)
	}
	for _, p := range pods.Items {
		node := testenv.Host(s, p.Spec.NodeName)
		testenv.Eventually(s, soon, func() error {
			conn, err := node.Dial(context.Background(), p.Status.PodIP+":8443")
			if err != nil {
				return err
			}
			defer conn.Close()
			secure := tls.Client(conn, &tls.Config{InsecureSkipVerify: true}) // the test reads the certificate
			if err := secure.Handshake(); err != nil {
				return err
			}
			if string(secure.ConnectionState().PeerCertificates[0].Raw) != string(want.Bytes) {
				return fmt.Errorf("pod %s has the previous certificate", p.Name)
			}
			return nil
		})
	}
}

// setCABundle makes the configuration trust certificates.
func (s *webhookServers) setCABundle(ns, name string, certs ...[]byte) {
	s.Helper()
	var all []byte
	for _, c := range certs {
		all = append(all, c...)
	}
	patch := fmt.Sprintf(`[{"op":"replace","path":"/webhooks/0/clientConfig/caBundle","value":%q}]`,
		base64.StdEncoding.EncodeToString(all))
	testenv.Kctl(s, "patch", "validatingwebhookconfiguration", name+"."+ns, "--type=json", "-p", patch)
}

// F41: the certificate of a webhook that fails closed is exchanged while it is in use: with both in the caBundle for the
// time between, no write fails at any replica.
func TestWebhookCertificateRotation(t *testing.T) {
	t.Parallel()
	s, ns := installWebhookServers(t, 2), testenv.Namespace(t)
	first := s.ca
	installValidating(t, ns, "rotated", webhook{from: s, path: "/allow", rules: aboutMaps, more: "failurePolicy: Fail"})
	stop := make(chan struct{})
	var writers sync.WaitGroup
	writes := make([]atomic.Int64, len(testenv.Replicas())) // of each replica
	end := sync.OnceFunc(func() { close(stop); writers.Wait() })
	t.Cleanup(end)
	for i, replica := range testenv.Replicas() {
		maps := testenv.ClientAt(t, replica).CoreV1().ConfigMaps(ns)
		writers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := maps.Create(context.Background(), newConfigMap("x"),
					metav1.CreateOptions{DryRun: []string{"All"}}); err != nil {
					t.Errorf("through %s: %v", replica, err)
					return
				}
				writes[i].Add(1)
			}
		})
	}
	cert, key := testCertificate(t, fmt.Sprintf("hooks.%s.svc", s.ns))
	more := func() { // writes at every replica since
		for i, replica := range testenv.Replicas() {
			from := writes[i].Load()
			testenv.Eventually(t, soon, func() error {
				if n := writes[i].Load() - from; n < 10 && !t.Failed() {
					return fmt.Errorf("%d writes through %s", n, replica)
				}
				return nil
			})
		}
	}
	more()
	s.setCABundle(ns, "rotated", first, cert)
	more()
	data, err := json.Marshal(map[string]any{"data": map[string][]byte{v1.TLSCertKey: cert, v1.TLSPrivateKeyKey: key}})
	if err == nil {
		_, err = testenv.Client(t).CoreV1().Secrets(s.ns).
			Patch(context.Background(), "hooks-certs", types.MergePatchType, data, metav1.PatchOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	s.awaitCertificate(cert)
	more()
	s.setCABundle(ns, "rotated", cert)
	more()
	end()
	s.setCABundle(ns, "rotated", first) // and without the time between it is refused, as it should be
	for _, replica := range testenv.Replicas() {
		createEventually(t, ns, replica, func(_ *v1.ConfigMap, err error) error {
			if !apierrors.IsInternalError(err) || !strings.Contains(err.Error(), "certificate") {
				return fmt.Errorf("%s with the previous certificate's CA: %w", replica, err)
			}
			return nil
		})
	}
	for i, replica := range testenv.Replicas() {
		t.Logf("%d writes through %s while the certificate was exchanged", writes[i].Load(), replica)
	}
}

// P29: a webhook on everything that fails closed does not lock the cluster out when its only pod goes: the cluster's
// own parts bring the pod back in its namespace, nodes stay ready, and everything else waits for it.
func TestWebhookOnEverything(t *testing.T) {
	s, ns := installWebhookServers(t, 1), testenv.Namespace(t)
	cs := testenv.Client(t)
	pods, err := cs.CoreV1().Pods(s.ns).List(context.Background(), metav1.ListOptions{})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("%d pods: %v", len(pods.Items), err)
	}
	installValidating(t, s.ns, "everything", webhook{from: s, path: "/allow", more: "failurePolicy: Fail",
		selector: "{}",
		rules:    `[{apiGroups: ["*"], apiVersions: ["*"], operations: ["*"], resources: ["*/*"]}]`})
	refused := func(err error) bool {
		return apierrors.IsInternalError(err) && strings.Contains(err.Error(), "failed calling webhook")
	}
	atOnce := metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
	if err := cs.CoreV1().Pods(s.ns).Delete(context.Background(), pods.Items[0].Name, atOnce); err != nil {
		t.Fatal(err)
	}
	n, held := 0, false
	testenv.Eventually(t, soon, func() error { // people wait for it
		n++
		_, err := cs.CoreV1().ConfigMaps(ns).Create(context.Background(), newConfigMap(fmt.Sprint("m-", n)),
			metav1.CreateOptions{})
		if refused(err) {
			held = true
		}
		if held {
			return nil
		}
		now, listed := cs.CoreV1().Pods(s.ns).List(context.Background(),
			metav1.ListOptions{FieldSelector: "status.phase=Running"})
		if listed == nil && len(now.Items) == 1 && now.Items[0].Name != pods.Items[0].Name {
			return nil // it was back before any request was delayed
		}
		return errors.Join(fmt.Errorf("no request was delayed: %w", err), listed)
	})
	testenv.Eventually(t, soon, func() error {
		n++
		_, err := cs.CoreV1().ConfigMaps(ns).Create(context.Background(), newConfigMap(fmt.Sprint("m-", n)),
			metav1.CreateOptions{})
		return err
	})
	s.runKctl("rollout", "status", "deployment/hooks", "--timeout=180s")
	nodes, err := cs.CoreV1().Nodes().List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes.Items {
		for _, c := range node.Status.Conditions {
			if c.Type == v1.NodeReady && c.Status != v1.ConditionTrue {
				t.Errorf("node %s is not ready: %s", node.Name, c.Message)
			}
		}
	}
	if !held {
		t.Log("the pod was back before a write was held up")
	}
}
