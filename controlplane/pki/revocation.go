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
	revocationKeyAt   = "not-before" // certificates that were issued until then are revoked
	revocationKeyUID  = "uid"        // of the Node whose deletion revoked them last
	revocationKeyName = "by-name"    // "true" when somebody revoked the node by its name
)

// Revocation revokes the certificates of a node that were issued until a time,
// to the second.
type Revocation struct {
	Node string
	At   time.Time
	UID  string // of the Node whose deletion it is for; may be empty
	// Named says that somebody revoked the node by its name: it comes back with a token that was made for that only.
	Named bool
}

// RevocationPrefix is how the names of such Secrets begin.
const RevocationPrefix = "revoked-node-"

// RevocationName is the name of the Secret, in TokenNamespace, that revokes certificates of a node.
func RevocationName(node string) string {
	sum := sha256.Sum256([]byte(node)) // a node's name may be as long as an object's
	return RevocationPrefix + hex.EncodeToString(sum[:16])
}

// revocationMargin is how far past its moment a revocation reaches: a replica whose clock is ahead, or that has just read
// that none exists, signs what would otherwise be later. It is below Backdate: what is issued when the revocation ends is
// valid at once.
const revocationMargin = 2 * time.Minute

// NewRevocation revokes all that a node was given until now, by whichever replica.
func NewRevocation(node string, now time.Time) Revocation {
	return Revocation{Node: node, At: now.Add(revocationMargin)}
}

// Further is r on top of an earlier one. It covers what was issued since then, which is as of the earlier one's After.
func (r Revocation) Further(was Revocation) Revocation {
	r.Named = r.Named || was.Named
	if r.UID == "" {
		r.UID = was.UID // a replica that hears of that deletion late does not revoke once more
	}
	if after := was.After(); after.After(r.At) {
		r.At = after
	}
	return r
}

// Or is what both revoke, of two that are known of a node: neither was there when the other was made.
func (r Revocation) Or(other Revocation) Revocation {
	if other.At.After(r.At) {
		r.At = other.At
	}
	r.Named = r.Named || other.Named
	return r
}

// Record is the Secret that stands for the revocation.
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

// RevocationOf reads a record; false for a Secret that is none. One that cannot
// be read revokes everything of its node: whoever wrote it meant to.
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

// Covers says whether a certificate of the node is revoked.
func (r Revocation) Covers(c *x509.Certificate) bool { return IssuedAt(c).Before(r.After()) }

// After is from when on a certificate of the node is good again.
func (r Revocation) After() time.Time { return r.At.Truncate(time.Second).Add(time.Second) }

// IssuedAt is when a certificate of this cluster was issued, to the second.
func IssuedAt(c *x509.Certificate) time.Time { return c.NotBefore.Add(Backdate) }
