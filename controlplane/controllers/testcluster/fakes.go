package testcluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"sync"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/controllers/horizontalpodautoscaler"
)

// FakeMetrics is a metrics source with a constant total load. The pods of a selector share the load
// evenly.
type FakeMetrics struct {
	Mu          sync.Mutex
	CurrentLoad int64 // total load of all pods, in thousandths; if it is negative, reading a metric fails
	ReadCount   int
	ListPods    func() []*corev1.Pod
}

// SetLoad sets the total load of all pods, in thousandths of a unit.
func (m *FakeMetrics) SetLoad(load int64) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.CurrentLoad = load
}

func (m *FakeMetrics) readLoad() (int64, error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.ReadCount++
	if m.CurrentLoad < 0 {
		return 0, errors.New("nobody answers")
	}
	return m.CurrentLoad, nil
}

// Resource implements horizontalpodautoscaler.Source: each selected pod has an equal share of the
// load.
func (m *FakeMetrics) Resource(_ context.Context, _ string, of labels.Selector, _ corev1.ResourceName, _ string) (
	horizontalpodautoscaler.Samples, error,
) {
	load, err := m.readLoad()
	if err != nil {
		return nil, err
	}
	out := horizontalpodautoscaler.Samples{}
	for _, p := range m.ListPods() {
		if of.Matches(labels.Set(p.Labels)) {
			out[p.Name] = horizontalpodautoscaler.Sample{At: time.Now(), Window: 15 * time.Second}
		}
	}
	for name, s := range out {
		s.Value = load / int64(len(out))
		out[name] = s
	}
	return out, nil
}

// Pods implements horizontalpodautoscaler.Source: each selected pod has an equal share of the load.
func (m *FakeMetrics) Pods(
	ctx context.Context, namespace string, of labels.Selector, _ autoscalingv2.MetricIdentifier,
) (horizontalpodautoscaler.Samples, error) {
	return m.Resource(ctx, namespace, of, "", "")
}

// Object implements horizontalpodautoscaler.Source: it returns the total load.
func (m *FakeMetrics) Object(
	context.Context, string, autoscalingv2.CrossVersionObjectReference, autoscalingv2.MetricIdentifier,
) (int64, error) {
	return m.readLoad()
}

// External implements horizontalpodautoscaler.Source: it returns the total load.
func (m *FakeMetrics) External(context.Context, string, autoscalingv2.MetricIdentifier) (int64, error) {
	return m.readLoad()
}

// SignRequest returns a PEM certificate for request r. Each call signs with a new key.
func SignRequest(
	r *x509.CertificateRequest, usage x509.KeyUsage, extended []x509.ExtKeyUsage, life time.Duration, now time.Time,
) ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: r.Subject, KeyUsage: usage, ExtKeyUsage: extended,
		NotBefore: now, NotAfter: now.Add(life)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, r.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

var FlunderResource = schema.GroupVersionResource{Group: "wardle.example.com", Version: "v1alpha1",
	Resource: "flunders"}

// FakeToken returns a fake token without a signature: a text with the account and the secret. Tests
// of the API server check real tokens.
func FakeToken(account *corev1.ServiceAccount, secret string) (string, error) {
	return fmt.Sprintf("%s/%s/%s for %s", account.Namespace, account.Name, account.UID, secret), nil
}
