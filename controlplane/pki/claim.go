package pki

import (
	"crypto/sha256"
	"encoding/hex"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClaimSecretType is the type of the Secrets by which a machine holds the name of a Node that it has yet to make.
const ClaimSecretType = corev1.SecretType("keelson.dev/node-claim")

// ClaimLife is how long a machine that has enrolled holds its name without making its Node. After it another may
// have the name, and what the first was given is revoked.
const ClaimLife = 10 * time.Minute

const (
	claimKeyNode = "node"
	claimKeyKey  = "key"
	claimKeyAt   = "since"
)

// Claim is a machine's on the name of a Node.
type Claim struct {
	Node string
	Key  string // tells the machine's key apart
	At   time.Time
}

// ClaimName is the name of the Secret, in TokenNamespace, that holds the name of a node.
func ClaimName(node string) string {
	sum := sha256.Sum256([]byte(node)) // a node's name may be as long as an object's
	return "claimed-node-" + hex.EncodeToString(sum[:16])
}

// Record is the Secret that stands for the claim.
func (c Claim) Record() *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: TokenNamespace, Name: ClaimName(c.Node)},
		Type:       ClaimSecretType,
		Data: map[string][]byte{
			claimKeyNode: []byte(c.Node), claimKeyKey: []byte(c.Key), claimKeyAt: []byte(c.At.UTC().Format(time.RFC3339Nano)),
		},
	}
}

// ClaimOf reads a record; false for a Secret that is none. One whose time cannot be read has ended.
func ClaimOf(s *corev1.Secret) (Claim, bool) {
	if s == nil || s.Type != ClaimSecretType {
		return Claim{}, false
	}
	at, _ := time.Parse(time.RFC3339, string(s.Data[claimKeyAt]))
	return Claim{Node: string(s.Data[claimKeyNode]), Key: string(s.Data[claimKeyKey]), At: at}, true
}

// Ended says that the machine had its time.
func (c Claim) Ended(now time.Time) bool { return !now.Before(c.At.Add(ClaimLife)) }
