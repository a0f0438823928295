package controllers_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/certificate"
	"keelson.dev/keelson/internal/virtual"
)

type signingRequest = certificatesv1.CertificateSigningRequest

// signRequest signs with an authority of the test's own.
func signRequest(r *x509.CertificateRequest, usage x509.KeyUsage, extended []x509.ExtKeyUsage, life time.Duration, now time.Time) ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: r.Subject, KeyUsage: usage, ExtKeyUsage: extended, NotBefore: now, NotAfter: now.Add(life)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, r.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

// reviewed answers SubjectAccessReviews: users in the table have the listed rights.
type reviewed struct {
	api.Backend
	asked atomic.Int64

	mu     sync.Mutex
	rights map[string]string
}

func (b *reviewed) grant(user, right string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rights[user] = right
}

func (b *reviewed) has(user, right string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rights[user] == right
}

func (b *reviewed) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	ask, ok := r.Object.(*authorizationv1.SubjectAccessReview)
	if !ok {
		return b.Backend.Do(ctx, r)
	}
	b.asked.Add(1)
	a := ask.Spec.ResourceAttributes
	answer := ask.DeepCopy()
	answer.Status.Allowed = a.Verb == "create" && a.Group == certificatesv1.GroupName && a.Resource == "certificatesigningrequests" &&
		b.has(ask.Spec.User, a.Subresource)
	return answer, nil
}

// certificateWorld is a world of requests for certificates.
func certificateWorld(t *testing.T, rights map[string]string, change func(*controllers.Controller)) (*world, *reviewed) {
	b := &reviewed{rights: rights}
	return newWorld(t, options{quiet: true, change: change, behind: func(real api.Backend) api.Backend {
		b.Backend = real
		return b
	}, only: func(d controllers.Deps) []*controllers.Controller {
		return []*controllers.Controller{certificate.New(d, certificate.Options{Sign: signRequest, Reserved: []string{"keelson:replicas"}})}
	}}), b
}

// ask creates a request for a node's client certificate on behalf of a user.
func (w *world) ask(name, by, node string, change ...func(*certificatesv1.CertificateSigningRequestSpec)) {
	w.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		w.t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: node, Organization: []string{"system:nodes"}}}, key)
	if err != nil {
		w.t.Fatal(err)
	}
	c := &signingRequest{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: certificatesv1.CertificateSigningRequestSpec{
		Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), Username: by,
		SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
		Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
	}}
	for _, f := range change {
		f(&c.Spec)
	}
	w.create(c)
}

// decide writes an approval condition as an approver does.
func (w *world) decide(name string, t certificatesv1.RequestConditionType) {
	w.t.Helper()
	w.eventually("deciding about "+name, func() error {
		c, err := client.Get[*signingRequest](w.ctx, w.admin, "", name)
		if err != nil {
			return err
		}
		c = c.DeepCopy()
		c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: t, Status: corev1.ConditionTrue, Reason: "Test", LastUpdateTime: metav1.Now(), LastTransitionTime: metav1.Now()})
		_, err = client.UpdateSub(w.ctx, w.admin, c, "approval")
		return err
	})
}

// state is where a request stands: the types and reasons of its conditions, and whether it has a certificate.
func (w *world) state(name string) string {
	c, err := client.Get[*signingRequest](w.ctx, w.admin, "", name)
	if err != nil {
		return string(metav1.StatusReasonNotFound)
	}
	out := ""
	for _, k := range c.Status.Conditions {
		out += string(k.Type) + ":" + k.Reason + " "
	}
	if len(c.Status.Certificate) > 0 {
		out += "Issued"
	}
	return out
}

// Requests in virtual time: users with the right are approved, users who get it later are approved
// later, requests that signers do not permit fail, and all requests are deleted at the end.
func TestCertificateRequestsEnd(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w, asked := certificateWorld(t, map[string]string{"system:node:w1": "selfnodeclient", "boot": "nodeclient"}, nil)
		w.lead(controllers.Options{})
		w.ask("self", "system:node:w1", "system:node:w1")
		w.ask("boot", "boot", "system:node:w3")
		w.ask("other", "system:node:w1", "system:node:w2") // which the right for the own name does not cover
		w.ask("serving", "boot", "system:node:w1", func(s *certificatesv1.CertificateSigningRequestSpec) {
			s.SignerName, s.Usages = certificatesv1.KubeletServingSignerName, []certificatesv1.KeyUsage{"server auth", "digital signature"}
		})
		w.ask("foreign", "ann", "ann", func(s *certificatesv1.CertificateSigningRequestSpec) { s.SignerName = "example.com/s" })
		w.ask("denied", "ann", "system:node:w1")
		w.decide("denied", certificatesv1.CertificateDenied)
		w.decide("serving", certificatesv1.CertificateApproved)
		w.decide("foreign", certificatesv1.CertificateApproved)
		steps := []struct {
			after time.Duration
			want  map[string]string
		}{
			{time.Minute, map[string]string{"self": "Approved:AutoApproved Issued", "boot": "Approved:AutoApproved Issued", "other": "",
				"serving": "Approved:Test Failed:SignerValidationFailure ", "foreign": "Approved:Test ", "denied": "Denied:Test "}},
			{58 * time.Minute, map[string]string{"self": "Approved:AutoApproved Issued", "denied": "Denied:Test "}},
			{2 * time.Minute, map[string]string{"self": "NotFound", "boot": "NotFound", "serving": "NotFound", "denied": "NotFound",
				"other": "", "foreign": "Approved:Test "}},
			{22*time.Hour + 58*time.Minute, map[string]string{"other": "", "foreign": "Approved:Test "}},
			{2 * time.Minute, map[string]string{"other": "NotFound", "foreign": "NotFound"}},
		}
		for _, s := range steps {
			time.Sleep(s.after)
			virtual.Wait()
			for name, want := range s.want {
				if got := w.state(name); got != want {
					t.Errorf("%v later, %s: %q, want %q", s.after, name, got, want)
				}
			}
		}
		if n := asked.asked.Load(); n > 500 { // one request waits all day: it is reviewed every five minutes and at each resync
			t.Errorf("%d reviews within a day", n)
		}
		w.ask("late", "late", "system:node:w9")
		time.Sleep(time.Minute)
		asked.grant("late", "nodeclient")
		time.Sleep(time.Minute)
		virtual.Wait()
		if got := w.state("late"); got != "Approved:AutoApproved Issued" {
			t.Errorf("who got the right later: %q", got)
		}
	})
}

// A controller that is interrupted between any two writes, loses half of its notifications and
// loses its leadership leaves no request unfinished: each permitted request gets one certificate,
// which is never replaced.
func TestCertificatesUnderFailures(t *testing.T) {
	var seed atomic.Uint64
	rights := map[string]string{}
	for i := range 40 {
		rights[fmt.Sprintf("system:node:w%d", i)] = "selfnodeclient"
	}
	w, _ := certificateWorld(t, rights, func(c *controllers.Controller) {
		cutOff("certificate-controller", 2, 2*time.Millisecond)(c)
		loseEvents(c, &seed)
	})
	issued := map[string]string{}
	check := func(name string) error {
		c, err := client.Get[*signingRequest](w.ctx, w.admin, "", name)
		if err != nil {
			return err
		}
		if was := issued[name]; was != "" && was != string(c.Status.Certificate) {
			t.Fatalf("%s has another certificate", name)
		}
		issued[name] = string(c.Status.Certificate)
		if len(c.Status.Certificate) == 0 || len(c.Status.Conditions) != 1 {
			return fmt.Errorf("%s: %s", name, w.state(name))
		}
		return nil
	}
	stop := w.lead(controllers.Options{Resync: 20 * time.Millisecond})
	for i := range 40 {
		node := fmt.Sprintf("system:node:w%d", i)
		w.ask(fmt.Sprint("r", i), node, node)
		if i%8 == 7 {
			stop()
			stop = w.lead(controllers.Options{Resync: 20 * time.Millisecond})
		}
	}
	for range 2 {
		for i := range 40 {
			w.eventually("a certificate", func() error { return check(fmt.Sprint("r", i)) })
		}
		stop()
		stop = w.lead(controllers.Options{Resync: 20 * time.Millisecond})
	}
}
