package pki

import (
	"crypto/sha256"
	"encoding/hex"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ClaimSecretType is the type of the Secrets that store a Claim. A claim reserves the name of a
// Node for a machine that has enrolled but not created its Node yet.
const ClaimSecretType = corev1.SecretType("keelson.dev/node-claim")

// ClaimLife is how long a Claim is valid. If the Node does not exist after this time, another
// machine may claim its name. The certificates of the first machine are then revoked.
const ClaimLife = 10 * time.Minute

const (
	claimKeyNode = "node"
	claimKeyKey  = "key"
	claimKeyAt   = "since"
)

// Claim reserves the name of a Node for one machine, identified by its key. The reservation starts
// at the time At.
type Claim struct {
	Node string
	Key  string // ID of the key in the machine's certificate request
	At   time.Time
}

// ClaimName returns the name of the Secret that stores the Claim for the name node. The Secret is
// in TokenNamespace.
func ClaimName(node string) string {
	sum := sha256.Sum256([]byte(node)) // hashed, since a node name may be as long as an object name
	return "claimed-node-" + hex.EncodeToString(sum[:16])
}

// Record returns the Secret that stores the claim.
func (c Claim) Record() *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: TokenNamespace, Name: ClaimName(c.Node)},
		Type:       ClaimSecretType,
		Data: map[string][]byte{
			claimKeyNode: []byte(c.Node), claimKeyKey: []byte(c.Key),
			claimKeyAt: []byte(c.At.UTC().Format(time.RFC3339Nano)),
		},
	}
}

// ParseClaim decodes a Secret of type ClaimSecretType. It returns false for other Secrets. If the
// time in the Secret cannot be parsed, the claim is expired.
func ParseClaim(s *corev1.Secret) (Claim, bool) {
	if s == nil || s.Type != ClaimSecretType {
		return Claim{}, false
	}
	at, _ := time.Parse(time.RFC3339, string(s.Data[claimKeyAt]))
	return Claim{Node: string(s.Data[claimKeyNode]), Key: string(s.Data[claimKeyKey]), At: at}, true
}

// IsExpired reports whether ClaimLife has passed since the claim was made.
func (c Claim) IsExpired(now time.Time) bool { return !now.Before(c.At.Add(ClaimLife)) }
