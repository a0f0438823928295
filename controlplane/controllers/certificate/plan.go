// Package certificate handles CertificateSigningRequests. It approves node client requests if RBAC
// permits it, signs approved requests for the signers of the cluster, and deletes old requests.
package certificate

import (
	"crypto/x509"
	"encoding/pem"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// Retention times of CertificateSigningRequests: decidedKept after the decision, and pendingKept
// for requests without a decision, as in Kubernetes. An approved request without a certificate is
// kept for pendingKept, because its signer may be outside the cluster. (Kubernetes documents an
// hour for approved requests. Its controller counts that hour from the certificate, and keeps
// requests without a certificate forever.)
const (
	decidedKept = time.Hour
	pendingKept = 24 * time.Hour
)

// Action is the next action of the controller for a CertificateSigningRequest.
type Action string

// Values of Action.
const (
	Wait   Action = "wait"   // wait for a decision, or until the request expires
	Review Action = "review" // check whether RBAC permits the approval
	Sign   Action = "sign"
	Remove Action = "remove"
)

// PlanRequest returns the next action for request c, and the delay after which it must be called
// again.
func PlanRequest(c *certificatesv1.CertificateSigningRequest, now time.Time) (action Action, again time.Duration) {
	left := cleanupTime(c).Sub(now)
	if left <= 0 {
		return Remove, 0
	}
	_, ours := signers[c.Spec.SignerName]
	switch {
	case ours && hasCondition(c, certificatesv1.CertificateApproved) &&
		!hasCondition(c, certificatesv1.CertificateFailed) && len(c.Status.Certificate) == 0:
		return Sign, left
	case c.Spec.SignerName == certificatesv1.KubeAPIServerClientKubeletSignerName && len(c.Status.Certificate) == 0 &&
		!hasCondition(c, certificatesv1.CertificateApproved) && !hasCondition(c, certificatesv1.CertificateDenied) &&
		!hasCondition(c, certificatesv1.CertificateFailed):
		// Permissions may change while the request waits. The longer it has waited, the less often
		// it is checked.
		return Review, min(left, max(time.Second, min(5*time.Minute, now.Sub(c.CreationTimestamp.Time)/4)))
	}
	return Wait, left
}

// cleanupTime returns the time at which request c must be deleted.
func cleanupTime(c *certificatesv1.CertificateSigningRequest) time.Time {
	until := c.CreationTimestamp.Add(pendingKept)
	for _, k := range c.Status.Conditions {
		since := k.LastUpdateTime
		if since.IsZero() {
			since = c.CreationTimestamp
		}
		var end time.Time
		switch {
		case k.Type == certificatesv1.CertificateApproved && len(c.Status.Certificate) == 0 &&
			!hasCondition(c, certificatesv1.CertificateFailed):
			until = since.Add(pendingKept)
			continue
		case k.Type == certificatesv1.CertificateApproved || k.Type == certificatesv1.CertificateDenied ||
			k.Type == certificatesv1.CertificateFailed:
			end = since.Add(decidedKept)
		default:
			continue
		}
		if end.Before(until) {
			until = end
		}
	}
	if end, ok := certificateExpiry(c.Status.Certificate); ok && end.Before(until) {
		until = end
	}
	return until
}

// certificateExpiry returns the time at which the first certificate of a PEM chain expires. It
// returns false if the chain does not start with a valid certificate.
func certificateExpiry(chain []byte) (time.Time, bool) {
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

func hasCondition(c *certificatesv1.CertificateSigningRequest, t certificatesv1.RequestConditionType) bool {
	return slices.ContainsFunc(c.Status.Conditions, func(k certificatesv1.CertificateSigningRequestCondition) bool {
		return k.Type == t
	})
}

// Rights returns subresources of CertificateSigningRequests. Request c of a node is approved if
// RBAC allows its requester to create one of these subresources. The result includes selfnodeclient
// only if the request is for the requester's own name.
func Rights(c *certificatesv1.CertificateSigningRequest, r *x509.CertificateRequest) []string {
	if c.Spec.SignerName != certificatesv1.KubeAPIServerClientKubeletSignerName || nodeClient(r, c.Spec.Usages) != nil {
		return nil
	}
	if c.Spec.Username == r.Subject.CommonName {
		return []string{"selfnodeclient", "nodeclient"}
	}
	return []string{"nodeclient"}
}
