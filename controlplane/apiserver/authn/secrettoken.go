package authn

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/pki"
)

// Labels of Secrets that hold a service account token.
const (
	LastUsedLabel     = "kubernetes.io/legacy-token-last-used"
	InvalidSinceLabel = "kubernetes.io/legacy-token-invalid-since"
)

const (
	// markAgain is the minimum interval between two attempts of a replica to write the last-used
	// label of a Secret. It limits writes when the cache lags or the store does not respond.
	markAgain = time.Minute
	// markPatience is how long a request waits for the last-used label to be written.
	markPatience = 2 * time.Second
)

// verifyOfSecret verifies a token that is stored in a Secret. Nothing is cached: each request
// checks that the Secret and the account still exist unchanged, since their change revokes the
// token.
func (s *ServiceAccounts) verifyOfSecret(ctx context.Context, token string, audiences []string) (TokenIdentity, bool, error) {
	c, err := s.tokens.VerifyOfSecret(token)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	good, err := both(audiences, s.audiences)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	secret, err := s.holder(ctx, c, token)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	uid, deletedAt, ok := s.living.UID(ctx, "serviceaccounts", c.Namespace, c.ServiceAccount.Name)
	switch {
	case !ok:
		return TokenIdentity{}, false, fmt.Errorf("service account token has been invalidated: serviceaccount %q no longer exists", c.ServiceAccount.Name)
	case uid != c.ServiceAccount.UID:
		return TokenIdentity{}, false, fmt.Errorf("service account token has been invalidated: serviceaccount %q is another object than the token was made for", c.ServiceAccount.Name)
	case !deletedAt.IsZero():
		return TokenIdentity{}, false, fmt.Errorf("service account token has been invalidated: serviceaccount %q is being deleted", c.ServiceAccount.Name)
	}
	s.mark(ctx, secret)
	return TokenIdentity{User: c.User(), Audiences: good}, true, nil
}

// holder returns the Secret that contains the token. It is an error if the Secret no longer exists,
// contains another token or is labeled as invalid.
func (s *ServiceAccounts) holder(ctx context.Context, c *pki.SecretClaims, token string) (*corev1.Secret, error) {
	o, _ := s.living.Get(ctx, "secrets", c.Namespace, c.Secret)
	secret, ok := o.(*corev1.Secret)
	if !ok || secret.DeletionTimestamp != nil {
		return nil, errors.New("service account token has been invalidated: its Secret is gone")
	}
	if subtle.ConstantTimeCompare(secret.Data[corev1.ServiceAccountTokenKey], []byte(token)) != 1 {
		return nil, errors.New("service account token has been invalidated: its Secret holds another one")
	}
	if secret.Labels[InvalidSinceLabel] != "" {
		return nil, fmt.Errorf("service account token has been invalidated: Secret %s/%s has label %s; remove the label to allow the token again, or use 'kubectl create token'",
			secret.Namespace, secret.Name, InvalidSinceLabel)
	}
	return secret, nil
}

// mark writes the current date into the last-used label of the Secret, unless the label has it. A
// failed write does not reject the request; it is retried after markAgain.
func (s *ServiceAccounts) mark(ctx context.Context, secret *corev1.Secret) {
	now := s.clock().UTC()
	today, tomorrow := now.Format(time.DateOnly), now.AddDate(0, 0, 1).Format(time.DateOnly)
	// A replica with a fast clock may have written the next day.
	if was := secret.Labels[LastUsedLabel]; s.markUsed == nil || was == today || was == tomorrow {
		return
	}
	s.mu.Lock()
	at, tried := s.marked[secret.UID]
	due := !tried || !now.Before(at.Add(markAgain)) || at.Format(time.DateOnly) != today
	if due {
		if len(s.marked) >= seenMax {
			clear(s.marked)
		}
		s.marked[secret.UID] = now
	}
	s.mu.Unlock()
	if !due {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, markPatience)
	defer cancel()
	_ = s.markUsed(ctx, secret, today)
}
