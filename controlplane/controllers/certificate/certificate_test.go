package certificate_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
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
	"keelson.dev/keelson/controlplane/controllers/certificate"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

type signingRequest = certificatesv1.CertificateSigningRequest

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
	answer.Status.Allowed = a.Verb == "create" && a.Group == certificatesv1.GroupName &&
		a.Resource == "certificatesigningrequests" &&
		b.has(ask.Spec.User, a.Subresource)
	return answer, nil
}

// certificateWorld is a world of requests for certificates.
func certificateWorld(t *testing.T, rights map[string]string, change func(*engine.Descriptor)) (
	*testcluster.Cluster, *reviewed,
) {
	b := &reviewed{rights: rights}
	return testcluster.New(t, testcluster.Options{NoMutationGuard: true, ChangeController: change,
		WrapBackend: func(real api.Backend) api.Backend {
			b.Backend = real
			return b
		}, Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{certificate.New(d,
				certificate.Options{Sign: testcluster.SignRequest, Reserved: []string{"keelson:replicas"}})}
		}}), b
}

// ask creates a request for a node's client certificate on behalf of a user.
func ask(w *testcluster.Cluster, name, by, node string, change ...func(*certificatesv1.CertificateSigningRequestSpec)) {
	w.T.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		w.T.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader,
		&x509.CertificateRequest{Subject: pkix.Name{CommonName: node, Organization: []string{"system:nodes"}}}, key)
	if err != nil {
		w.T.Fatal(err)
	}
	c := &signingRequest{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: certificatesv1.CertificateSigningRequestSpec{
		Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
		SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
		Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
	}}
	for _, f := range change {
		f(&c.Spec)
	}
	w.CreateObjectAs(by, c)
}

// decide writes an approval condition as an approver does.
func decide(w *testcluster.Cluster, name string, t certificatesv1.RequestConditionType) {
	w.T.Helper()
	w.Eventually("deciding about "+name, func() error {
		c, err := client.Get[*signingRequest](w.Ctx, w.Admin, "", name)
		if err != nil {
			return err
		}
		c = c.DeepCopy()
		c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: t, Status: corev1.ConditionTrue, Reason: "Test", LastUpdateTime: metav1.Now(),
			LastTransitionTime: metav1.Now()})
		_, err = client.UpdateSub(w.Ctx, w.Admin, c, "approval")
		return err
	})
}

// state is where a request stands: the types and reasons of its conditions, and whether it has a certificate.
func state(w *testcluster.Cluster, name string) string {
	c, err := client.Get[*signingRequest](w.Ctx, w.Admin, "", name)
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
		w, asked := certificateWorld(t, map[string]string{"system:node:w1": "selfnodeclient", "boot": "nodeclient"},
			nil)
		w.Lead(engine.Options{})
		ask(w, "self", "system:node:w1", "system:node:w1")
		ask(w, "boot", "boot", "system:node:w3")
		ask(w, "other", "system:node:w1", "system:node:w2") // which the right for the own name does not cover
		ask(w, "serving", "boot", "system:node:w1", func(s *certificatesv1.CertificateSigningRequestSpec) {
			s.SignerName, s.Usages = certificatesv1.KubeletServingSignerName,
				[]certificatesv1.KeyUsage{"server auth", "digital signature"}
		})
		ask(w, "foreign", "ann", "ann", func(s *certificatesv1.CertificateSigningRequestSpec) {
			s.SignerName = "example.com/s"
		})
		ask(w, "denied", "ann", "system:node:w1")
		decide(w, "denied", certificatesv1.CertificateDenied)
		decide(w, "serving", certificatesv1.CertificateApproved)
		decide(w, "foreign", certificatesv1.CertificateApproved)
		steps := []struct {
			after time.Duration
			want  map[string]string
		}{
			{time.Minute, map[string]string{"self": "Approved:AutoApproved Issued",
				"boot": "Approved:AutoApproved Issued", "other": "",
				"serving": "Approved:Test Failed:SignerValidationFailure ", "foreign": "Approved:Test ",
				"denied": "Denied:Test "}},
			{58 * time.Minute, map[string]string{"self": "Approved:AutoApproved Issued", "denied": "Denied:Test "}},
			{2 * time.Minute, map[string]string{"self": "NotFound", "boot": "NotFound", "serving": "NotFound",
				"denied": "NotFound",
				"other":  "", "foreign": "Approved:Test "}},
			{22*time.Hour + 58*time.Minute, map[string]string{"other": "", "foreign": "Approved:Test "}},
			{2 * time.Minute, map[string]string{"other": "NotFound", "foreign": "NotFound"}},
		}
		for _, s := range steps {
			time.Sleep(s.after)
			virtual.Wait()
			for name, want := range s.want {
				if got := state(w, name); got != want {
					t.Errorf("%v later, %s: %q, want %q", s.after, name, got, want)
				}
			}
		}
		if n := asked.asked.Load(); n > 500 {
			// one request waits all day: it is reviewed every five minutes and at each resync
			t.Errorf("%d reviews within a day", n)
		}
		ask(w, "late", "late", "system:node:w9")
		time.Sleep(time.Minute)
		asked.grant("late", "nodeclient")
		time.Sleep(time.Minute)
		virtual.Wait()
		if got := state(w, "late"); got != "Approved:AutoApproved Issued" {
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
	w, _ := certificateWorld(t, rights, func(c *engine.Descriptor) {
		testcluster.CutOff("certificate-controller", 2, 2*time.Millisecond)(c)
		testcluster.LoseEvents(c, &seed)
	})
	issued := map[string]string{}
	check := func(name string) error {
		c, err := client.Get[*signingRequest](w.Ctx, w.Admin, "", name)
		if err != nil {
			return err
		}
		if was := issued[name]; was != "" && was != string(c.Status.Certificate) {
			t.Fatalf("%s has another certificate", name)
		}
		issued[name] = string(c.Status.Certificate)
		if len(c.Status.Certificate) == 0 || len(c.Status.Conditions) != 1 {
			return fmt.Errorf("%s: %s", name, state(w, name))
		}
		return nil
	}
	stop := w.Lead(engine.Options{Resync: 20 * time.Millisecond})
	for i := range 40 {
		node := fmt.Sprintf("system:node:w%d", i)
		ask(w, fmt.Sprint("r", i), node, node)
		if i%8 == 7 {
			stop()
			stop = w.Lead(engine.Options{Resync: 20 * time.Millisecond})
		}
	}
	for range 2 {
		for i := range 40 {
			w.Eventually("a certificate", func() error { return check(fmt.Sprint("r", i)) })
		}
		stop()
		stop = w.Lead(engine.Options{Resync: 20 * time.Millisecond})
	}
}
