package pki

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// RevocationSecretType is the type of the Secrets that revoke the certificates of nodes.
const RevocationSecretType = corev1.SecretType("keelson.dev/node-revocation")

const (
	revocationKeyNode = "node"
	revocationKeyAt   = "not-before" // certificates that were issued before this time are revoked
	revocationKeyUID  = "uid"        // UID of the deleted Node that caused the latest revocation
	revocationKeyName = "by-name"    // "true" if an operator revoked the node by name
)

// Revocation revokes the certificates of a node that were issued before the time At. The precision
// is one second.
type Revocation struct {
	Node string
	At   time.Time
	UID  string // UID of the deleted Node that caused the revocation; may be empty
	// Named is true if an operator revoked the node by name. The node can then rejoin only with a
	// join token that has Grant.Replace set.
	Named bool
}

// RevocationPrefix is the name prefix of revocation Secrets.
const RevocationPrefix = "revoked-node-"

// RevocationName returns the name of the Secret that stores the revocation of a node. The Secret is
// in TokenNamespace.
func RevocationName(node string) string {
	sum := sha256.Sum256([]byte(node)) // hashed, since a node name may be as long as an object name
	return RevocationPrefix + hex.EncodeToString(sum[:16])
}

// revocationMargin extends a revocation into the future. It covers certificates that are issued by
// a replica with a fast clock, or by a replica that has not received the revocation yet. It is less
// than Backdate, so that a certificate is valid immediately if it is issued when the revocation
// ends.
const revocationMargin = 2 * time.Minute

// NewRevocation returns a revocation of all certificates that any replica has issued to node before
// the time now.
func NewRevocation(node string, now time.Time) Revocation {
	return Revocation{Node: node, At: now.Add(revocationMargin)}
}

// Extend returns a copy of r that also covers everything that the revocation earlier covers.
// Certificates that were issued while earlier was in effect are dated earlier.After(). The result
// covers them too.
func (r Revocation) Extend(earlier Revocation) Revocation {
	r.Named = r.Named || earlier.Named
	if r.UID == "" {
		r.UID = earlier.UID // A replica that observes that deletion late then does not revoke again.
	}
	if after := earlier.After(); after.After(r.At) {
		r.At = after
	}
	return r
}

// Merge returns a revocation that covers everything that r and other cover. The two are revocations
// of the same node that were created independently.
func (r Revocation) Merge(other Revocation) Revocation {
	if other.At.After(r.At) {
		r.At = other.At
	}
	r.Named = r.Named || other.Named
	return r
}

// Record returns the Secret that stores the revocation.
func (r Revocation) Record() *corev1.Secret {
	s := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: TokenNamespace, Name: RevocationName(r.Node)},
		Type:       RevocationSecretType,
		Data: map[string][]byte{
			revocationKeyNode: []byte(r.Node),
			revocationKeyAt:   []byte(r.At.UTC().Format(time.RFC3339)),
		},
	}
	if r.UID != "" {
		s.Data[revocationKeyUID] = []byte(r.UID)
	}
	if r.Named {
		s.Data[revocationKeyName] = []byte("true")
	}
	return s
}

// ParseRevocation decodes a Secret of type RevocationSecretType. It returns false for other
// Secrets. If the time in the Secret cannot be parsed, the result revokes all certificates of the
// node.
func ParseRevocation(s *corev1.Secret) (Revocation, bool) {
	if s == nil || s.Type != RevocationSecretType {
		return Revocation{}, false
	}
	at, err := time.Parse(time.RFC3339, string(s.Data[revocationKeyAt]))
	if err != nil {
		at = time.Unix(1<<40, 0)
	}
	return Revocation{
		Node: string(s.Data[revocationKeyNode]), At: at,
		UID: string(s.Data[revocationKeyUID]), Named: string(s.Data[revocationKeyName]) == "true",
	}, true
}

// Covers reports whether r revokes c, a certificate of the node.
func (r Revocation) Covers(c *x509.Certificate) bool { return IssuedAt(c).Before(r.After()) }

// After returns the end of the revocation: certificates of the node that are issued from this time
// on are not revoked.
func (r Revocation) After() time.Time { return r.At.Truncate(time.Second).Add(time.Second) }

// IssuedAt returns when c, a certificate of this cluster, was issued. The precision is one second.
func IssuedAt(c *x509.Certificate) time.Time { return c.NotBefore.Add(Backdate) }
