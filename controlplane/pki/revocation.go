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
	revocationKeyAt   = "not-before" // certificates issued until this time are revoked
	revocationKeyUID  = "uid"        // of the deleted Node that caused the latest revocation
	revocationKeyName = "by-name"    // "true" if the node was revoked explicitly by name
)

// Revocation revokes the certificates of a node that were issued until a time, with a precision of
// seconds.
type Revocation struct {
	Node string
	At   time.Time
	UID  string // UID of the deleted Node that caused it; may be empty
	// Named is true if the node was revoked explicitly by name. It can then rejoin only with a join
	// token that has Grant.Replace set.
	Named bool
}

// RevocationPrefix is the name prefix of revocation Secrets.
const RevocationPrefix = "revoked-node-"

// RevocationName returns the name of the revocation Secret of a node, in TokenNamespace.
func RevocationName(node string) string {
	sum := sha256.Sum256([]byte(node)) // hashed, since a node name may be as long as an object name
	return RevocationPrefix + hex.EncodeToString(sum[:16])
}

// revocationMargin extends a revocation into the future. It covers certificates of replicas with a
// fast clock or without the new revocation. It is less than Backdate, so that a certificate issued
// when the revocation ends is valid at once.
const revocationMargin = 2 * time.Minute

// NewRevocation returns a revocation of all certificates that any replica has issued to a node
// until now.
func NewRevocation(node string, now time.Time) Revocation {
	return Revocation{Node: node, At: now.Add(revocationMargin)}
}

// Further returns r extended by the earlier revocation was. Its time is at least was.After(), from
// which certificates issued since then are dated, so that it covers them too.
func (r Revocation) Further(was Revocation) Revocation {
	r.Named = r.Named || was.Named
	if r.UID == "" {
		r.UID = was.UID // A replica that observes that deletion late then does not revoke again.
	}
	if after := was.After(); after.After(r.At) {
		r.At = after
	}
	return r
}

// Or returns a revocation that covers both r and other. It is for two revocations of a node that
// were created independently of each other.
func (r Revocation) Or(other Revocation) Revocation {
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

// RevocationOf decodes a revocation Secret; false for other Secrets. If its time cannot be read, it
// revokes all certificates of the node.
func RevocationOf(s *corev1.Secret) (Revocation, bool) {
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

// Covers reports whether a certificate of the node is revoked.
func (r Revocation) Covers(c *x509.Certificate) bool { return IssuedAt(c).Before(r.After()) }

// After returns the time from which newly issued certificates of the node are not revoked.
func (r Revocation) After() time.Time { return r.At.Truncate(time.Second).Add(time.Second) }

// IssuedAt returns when a certificate of this cluster was issued, with a precision of seconds.
func IssuedAt(c *x509.Certificate) time.Time { return c.NotBefore.Add(Backdate) }
