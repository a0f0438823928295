package certificate

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	signs     = certificatesv1.UsageDigitalSignature
	enciphers = certificatesv1.UsageKeyEncipherment
	asClient  = certificatesv1.UsageClientAuth
	serves    = certificatesv1.UsageServerAuth
)

// Each signer permits only certain subjects, alternative names and usages.
func TestPermitted(t *testing.T) {
	asked := func(cn string, orgs ...string) *x509.CertificateRequest {
		return &x509.CertificateRequest{Subject: pkix.Name{CommonName: cn, Organization: orgs}}
	}
	node := func(change func(r *x509.CertificateRequest)) *x509.CertificateRequest {
		r := asked("system:node:w1", "system:nodes")
		if change != nil {
			change(r)
		}
		return r
	}
	named := func(r *x509.CertificateRequest) { r.DNSNames = []string{"w1"} }
	at := func(r *x509.CertificateRequest) { r.IPAddresses = []net.IP{net.IPv4(192, 0, 2, 1)} }
	mail := func(r *x509.CertificateRequest) { r.EmailAddresses = []string{"a@b.c"} }
	uri := func(r *x509.CertificateRequest) { r.URIs = []*url.URL{{Scheme: "x", Host: "y"}} }
	both := func(a, b func(*x509.CertificateRequest)) func(*x509.CertificateRequest) {
		return func(r *x509.CertificateRequest) { a(r); b(r) }
	}
	const client, kubelet, serving = certificatesv1.KubeAPIServerClientSignerName,
		certificatesv1.KubeAPIServerClientKubeletSignerName, certificatesv1.KubeletServingSignerName
	type usages = []certificatesv1.KeyUsage
	for _, c := range []struct {
		name, signer string
		r            *x509.CertificateRequest
		usages       usages
		refused      string // "" = permitted
	}{
		{"a user", client, asked("ann", "team"), usages{asClient}, ""},
		{"a user, every usage", client, asked("ann"), usages{signs, enciphers, asClient}, ""},
		{"a user with names", client, func() *x509.CertificateRequest {
			r := asked("ann")
			named(r)
			mail(r)
			return r
		}(), usages{asClient}, ""},
		{"a user who serves", client, asked("ann"), usages{asClient, serves}, `usage "server auth" is not allowed`},
		{"a user without the usage", client, asked("ann"), usages{signs}, `usage "client auth" is required`},
		{"a user as an authority", client, asked("ann"), usages{asClient, certificatesv1.UsageCertSign},
			`usage "cert sign" is not allowed`},
		{"a user with any usage", client, asked("ann"), usages{asClient, certificatesv1.UsageAny},
			`usage "any" is not allowed`},
		{"a replica", client, asked("cp1", "team", "keelson:replicas"), usages{asClient},
			"is reserved for the cluster itself"},
		{"a node", kubelet, node(nil), usages{signs, enciphers, asClient}, ""},
		{"a node without encipherment", kubelet, node(nil), usages{signs, asClient}, ""},
		{"a node that does not sign", kubelet, node(nil), usages{enciphers, asClient},
			`usage "digital signature" is required`},
		{"a node that serves", kubelet, node(nil), usages{signs, asClient, serves},
			`usage "server auth" is not allowed`},
		{"a node with a name", kubelet, node(named), usages{signs, asClient}, "DNS subjectAltNames are not allowed"},
		{"a node with an address", kubelet, node(at), usages{signs, asClient}, "IP subjectAltNames are not allowed"},
		{"a node with mail", kubelet, node(mail), usages{signs, asClient}, "email subjectAltNames are not allowed"},
		{"a node with a URI", kubelet, node(uri), usages{signs, asClient}, "URI subjectAltNames are not allowed"},
		{"a node of two groups", kubelet, asked("system:node:w1", "system:nodes", "team"), usages{signs, asClient},
			"subject organization is not system:nodes"},
		{"a node of no group", kubelet, asked("system:node:w1"), usages{signs, asClient},
			"subject organization is not system:nodes"},
		{"no node's name", kubelet, asked("ann", "system:nodes"), usages{signs, asClient},
			"does not begin with system:node:"},
		{"a node's server", serving, node(both(named, at)), usages{signs, enciphers, serves}, ""},
		{"a node's server by address", serving, node(at), usages{signs, serves}, ""},
		{"a node's server without a name", serving, node(nil), usages{signs, serves},
			"a DNS or IP subjectAltName is required"},
		{"a node's server with a URI", serving, node(both(named, uri)), usages{signs, serves},
			"URI subjectAltNames are not allowed"},
		{"a node's server with mail", serving, node(both(named, mail)), usages{signs, serves},
			"email subjectAltNames are not allowed"},
		{"a node's server that is a client", serving, node(named), usages{signs, serves, asClient},
			`usage "client auth" is not allowed`},
		{"a node's server that does not sign", serving, node(named), usages{serves, enciphers},
			`usage "digital signature" is required`},
		{"somebody's server", serving, func() *x509.CertificateRequest {
			r := asked("x", "system:nodes")
			named(r)
			return r
		}(), usages{signs, serves},
			"does not begin with system:node:"},
		{"another signer", "example.com/s", asked("ann"), usages{asClient}, "is not a signer of this cluster"},
	} {
		err := Permitted(c.signer, c.r, c.usages, []string{"keelson:replicas"})
		if c.refused == "" && err != nil || c.refused != "" &&
			(err == nil || !strings.Contains(err.Error(), c.refused)) {
			t.Errorf("%s: %v, want %q", c.name, err, c.refused)
		}
	}
}

// A requested lifetime is granted between ten minutes and a year.
func TestLife(t *testing.T) {
	for seconds, want := range map[int32]time.Duration{600: 10 * time.Minute, 60: 10 * time.Minute, 3600: time.Hour,
		1 << 30: longestLife} {
		if got := Life(&seconds); got != want {
			t.Errorf("%d s: %v, want %v", seconds, got, want)
		}
	}
	if got := Life(nil); got != longestLife {
		t.Errorf("nothing asked for: %v", got)
	}
}

// Rights that permit automatic approval of a node's request. The right for one's own name does not
// cover other names.
func TestRights(t *testing.T) {
	asked := &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:w1",
		Organization: []string{"system:nodes"}}}
	for _, c := range []struct {
		by, signer string
		usages     []certificatesv1.KeyUsage
		want       string
	}{
		{"system:node:w1", certificatesv1.KubeAPIServerClientKubeletSignerName,
			[]certificatesv1.KeyUsage{signs, asClient}, "selfnodeclient nodeclient"},
		{"system:node:w2", certificatesv1.KubeAPIServerClientKubeletSignerName,
			[]certificatesv1.KeyUsage{signs, asClient}, "nodeclient"},
		{"system:node:w1", certificatesv1.KubeAPIServerClientKubeletSignerName,
			[]certificatesv1.KeyUsage{signs, serves}, ""},
		{"system:node:w1", certificatesv1.KubeletServingSignerName, []certificatesv1.KeyUsage{signs, asClient}, ""},
		{"system:node:w1", certificatesv1.KubeAPIServerClientSignerName,
			[]certificatesv1.KeyUsage{signs, asClient}, ""},
	} {
		r := &certificatesv1.CertificateSigningRequest{
			Spec: certificatesv1.CertificateSigningRequestSpec{Username: c.by, SignerName: c.signer, Usages: c.usages}}
		if got := strings.Join(Rights(r, asked), " "); got != c.want {
			t.Errorf("%s at %s with %v: %q, want %q", c.by, c.signer, c.usages, got, c.want)
		}
	}
}

// When a request is deleted, and the action until then.
func TestPlan(t *testing.T) {
	began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	type conditions map[certificatesv1.RequestConditionType]time.Duration // when they were set
	ends := certificate(t, began.Add(30*time.Minute))
	lasts := certificate(t, began.Add(300*time.Hour))
	const kubelet = certificatesv1.KubeAPIServerClientKubeletSignerName
	for _, c := range []struct {
		name, signer string
		set          conditions
		chain        []byte
		after        time.Duration
		want         Action
		again        time.Duration
	}{
		{"of a node, at once", kubelet, nil, nil, 0, Review, time.Second},
		{"of a node, after an hour", kubelet, nil, nil, time.Hour, Review, 5 * time.Minute},
		{"of a node, near the end", kubelet, nil, nil, 24*time.Hour - time.Minute, Review, time.Minute},
		{"of a node, denied", kubelet, conditions{"Denied": 0}, nil, 0, Wait, time.Hour},
		{"pending", "x.io/y", nil, nil, 0, Wait, 24 * time.Hour},
		{"pending for a day", "x.io/y", nil, nil, 24 * time.Hour, Remove, 0},
		{"approved, of ours", kubelet, conditions{"Approved": time.Hour}, nil, time.Hour, Sign, 24 * time.Hour},
		{"approved, of another's", "x.io/y", conditions{"Approved": 23 * time.Hour}, nil, 25 * time.Hour, Wait,
			22 * time.Hour},
		{"approved, of another's, for a day", "x.io/y", conditions{"Approved": 0}, nil, 24 * time.Hour, Remove, 0},
		{"approved and failed", kubelet, conditions{"Approved": 0, "Failed": 0}, nil, time.Minute, Wait,
			59 * time.Minute},
		{"failed for an hour", kubelet, conditions{"Approved": 0, "Failed": 0}, nil, time.Hour, Remove, 0},
		{"denied for an hour", "x.io/y", conditions{"Denied": time.Hour}, nil, 2 * time.Hour, Remove, 0},
		{"issued", kubelet, conditions{"Approved": 0}, lasts, time.Minute, Wait, 59 * time.Minute},
		{"issued for an hour", kubelet, conditions{"Approved": 0}, lasts, time.Hour, Remove, 0},
		{"issued and expired", kubelet, conditions{"Approved": 0}, ends, 30 * time.Minute, Remove, 0},
		{"issued, expires soon", kubelet, conditions{"Approved": 0}, ends, 0, Wait, 30 * time.Minute},
	} {
		r := &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(began)},
			Spec:       certificatesv1.CertificateSigningRequestSpec{SignerName: c.signer},
			Status:     certificatesv1.CertificateSigningRequestStatus{Certificate: c.chain}}
		for k, at := range c.set {
			r.Status.Conditions = append(r.Status.Conditions,
				certificatesv1.CertificateSigningRequestCondition{Type: k,
					LastUpdateTime: metav1.NewTime(began.Add(at))})
		}
		if action, again := PlanRequest(r, began.Add(c.after)); action != c.want || again != c.again {
			t.Errorf("%s: %s, again after %v; want %s, %v", c.name, action, again, c.want, c.again)
		}
	}
}

func certificate(t *testing.T, until time.Time) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: until}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
