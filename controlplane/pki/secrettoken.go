package pki

import (
	"fmt"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"keelson.dev/keelson/controlplane/api"
)

// SecretIssuer is the issuer of service account tokens that are stored in Secrets.
const SecretIssuer = "kubernetes/serviceaccount"

// SecretClaims are the claims of a service account token that is stored in a Secret. Such a token
// has no expiry and no audience: the API server accepts it while the Secret contains it.
type SecretClaims struct {
	Namespace      string
	ServiceAccount Ref
	Secret         string // name of the Secret, which is in the same namespace
}

// User returns the user that the token authenticates.
func (c *SecretClaims) User() api.User {
	return (&Claims{Namespace: c.Namespace, ServiceAccount: c.ServiceAccount}).User()
}

// wireSecretClaims is the JSON format of SecretClaims in a token.
type wireSecretClaims struct {
	jwt.Claims
	Namespace string `json:"kubernetes.io/serviceaccount/namespace"`
	Secret    string `json:"kubernetes.io/serviceaccount/secret.name"`
	Account   string `json:"kubernetes.io/serviceaccount/service-account.name"`
	UID       string `json:"kubernetes.io/serviceaccount/service-account.uid"`
}

// SignForSecret signs a token with the claims, to be stored in a Secret.
func (t *ServiceTokens) SignForSecret(c SecretClaims) (string, error) {
	w := wireSecretClaims{Namespace: c.Namespace, Secret: c.Secret, Account: c.ServiceAccount.Name,
		UID: c.ServiceAccount.UID}
	w.Issuer, w.Subject = SecretIssuer, api.ServiceAccountPrefix+c.Namespace+":"+c.ServiceAccount.Name
	text, err := jwt.Signed(t.keys.Load().signer).Claims(w).Serialize()
	if err != nil {
		return "", fmt.Errorf("pki: signing the token of Secret %s/%s: %w", c.Namespace, c.Secret, err)
	}
	return text, nil
}

// ParseSecretClaims returns the claims of text, a service account token that is stored in a Secret.
// It does not verify the token. ok is false for other tokens.
func ParseSecretClaims(text string) (c SecretClaims, ok bool) {
	token, err := jwt.ParseSigned(text, []jose.SignatureAlgorithm{jose.ES256})
	if err != nil {
		return c, false
	}
	var w wireSecretClaims
	if err := token.UnsafeClaimsWithoutVerification(&w); err != nil || w.Issuer != SecretIssuer {
		return c, false
	}
	return SecretClaims{Namespace: w.Namespace, ServiceAccount: Ref{Name: w.Account, UID: w.UID}, Secret: w.Secret},
		true
}

// VerifySecretToken verifies the signature and issuer of text, a service account token that is
// stored in a Secret, and returns its claims. The caller must check that the Secret still contains
// the token and that the account exists. The error wraps ErrMalformed, ErrSignature or ErrIssuer
// and never contains the token.
func (t *ServiceTokens) VerifySecretToken(text string) (*SecretClaims, error) {
	var w wireSecretClaims
	err := t.decodeSigned(text, &w)
	switch {
	case err != nil:
	case w.Issuer != SecretIssuer:
		err = ErrIssuer
	case w.Namespace == "" || w.Secret == "" || w.Account == "" || w.UID == "":
		err = fmt.Errorf("%w: the claims of its Secret and service account are missing", ErrMalformed)
	case w.Subject != api.ServiceAccountPrefix+w.Namespace+":"+w.Account:
		err = fmt.Errorf("%w: its subject differs from its service account", ErrMalformed)
	}
	if err != nil {
		return nil, fmt.Errorf("pki: service account token of a Secret: %w", err)
	}
	return &SecretClaims{Namespace: w.Namespace, ServiceAccount: Ref{Name: w.Account, UID: w.UID}, Secret: w.Secret},
		nil
}
