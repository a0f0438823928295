// Package certificate decides about requests for certificates: it approves those of nodes for themselves where roles
// let it, signs what was approved for the signers that come with the cluster, and removes requests that are done.
package certificate

import (
	"crypto/x509"
	"encoding/pem"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// How long requests are kept, as by Kubernetes: once decided, and while nobody has decided. One that was approved and
// has no certificate waits for its signer, which need not be of this cluster. Kubernetes' documentation says an hour of
// approved requests, and its controller counts that from the certificate and keeps those without one for ever: here a
// signer has a day.
const (
	decidedKept = time.Hour
	pendingKept = 24 * time.Hour
)

// Deed is what is to be done with a request.
type Deed string

// The deeds.
const (
	Wait   Deed = "wait"   // for somebody, or until its time is over
	Review Deed = "review" // whether roles let it be approved
	Sign   Deed = "sign"
	Remove Deed = "remove"
)

// Plan says what to do with a request now, and when it is to be looked at again.
func Plan(c *certificatesv1.CertificateSigningRequest, now time.Time) (deed Deed, again time.Duration) {
	left := deadline(c).Sub(now)
	if left <= 0 {
		return Remove, 0
	}
	_, ours := signers[c.Spec.SignerName]
	switch {
	case ours && has(c, certificatesv1.CertificateApproved) && !has(c, certificatesv1.CertificateFailed) && len(c.Status.Certificate) == 0:
		return Sign, left
	case c.Spec.SignerName == certificatesv1.KubeAPIServerClientKubeletSignerName && len(c.Status.Certificate) == 0 &&
		!has(c, certificatesv1.CertificateApproved) && !has(c, certificatesv1.CertificateDenied) && !has(c, certificatesv1.CertificateFailed):
		// Roles may change while it waits: the longer it has waited, the rarer it is looked at.
		return Review, min(left, max(time.Second, min(5*time.Minute, now.Sub(c.CreationTimestamp.Time)/4)))
	}
	return Wait, left
}

// deadline is until when a request is kept.
func deadline(c *certificatesv1.CertificateSigningRequest) time.Time {
	until := c.CreationTimestamp.Add(pendingKept)
	for _, k := range c.Status.Conditions {
		since := k.LastUpdateTime
		if since.IsZero() {
			since = c.CreationTimestamp
		}
		var end time.Time
		switch {
		case k.Type == certificatesv1.CertificateApproved && len(c.Status.Certificate) == 0 && !has(c, certificatesv1.CertificateFailed):
			until = since.Add(pendingKept)
			continue
		case k.Type == certificatesv1.CertificateApproved || k.Type == certificatesv1.CertificateDenied || k.Type == certificatesv1.CertificateFailed:
			end = since.Add(decidedKept)
		default:
			continue
		}
		if end.Before(until) {
			until = end
		}
	}
	if end, ok := expires(c.Status.Certificate); ok && end.Before(until) {
		until = end
	}
	return until
}

// expires is when the first certificate of a chain does.
func expires(chain []byte) (time.Time, bool) {
	block, _ := pem.Decode(chain)
	if block == nil {
		return time.Time{}, false
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return time.Time{}, false
	}
	return cert.NotAfter, true
}

func has(c *certificatesv1.CertificateSigningRequest, t certificatesv1.RequestConditionType) bool {
	return slices.ContainsFunc(c.Status.Conditions, func(k certificatesv1.CertificateSigningRequestCondition) bool { return k.Type == t })
}

// Rights are the rights by one of which a request of a node is approved, to create a part of requests: that for its own
// name, when it asks for that, and that for any node.
func Rights(c *certificatesv1.CertificateSigningRequest, r *x509.CertificateRequest) []string {
	if c.Spec.SignerName != certificatesv1.KubeAPIServerClientKubeletSignerName || nodeClient(r, c.Spec.Usages) != nil {
		return nil
	}
	if c.Spec.Username == r.Subject.CommonName {
		return []string{"selfnodeclient", "nodeclient"}
	}
	return []string{"nodeclient"}
}
