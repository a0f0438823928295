package accept

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
)

// sweepInterval is the interval between sweeps. clockMargin is the accepted difference between the
// clocks of replicas.
const (
	sweepInterval = 10 * time.Minute
	clockMargin   = 10 * time.Minute
)

// sweeper deletes the records of tokens, claims and revocations that no longer have an effect.
type sweeper struct {
	listSecrets  func() []*v1.Secret
	nodeExists   func(node string) bool
	life         time.Duration // lifetime of a node's certificate
	removeSecret func(context.Context, *v1.Secret) error
}

// runSweeps deletes the expired records immediately and then every sweepInterval. It returns when
// ctx ends or a deletion fails.
func (s sweeper) runSweeps(ctx context.Context) error {
	for {
		now := time.Now()
		for _, secret := range s.listSecrets() {
			if !s.isExpired(secret, now) {
				continue
			}
			if err := s.removeSecret(ctx, secret); err != nil && ctx.Err() == nil {
				return err // the leader restarts this part of its work
			}
		}
		if err := wait.Delay(ctx, sweepInterval); err != nil {
			return err
		}
	}
}

// isExpired reports whether a record of a token, claim or revocation no longer allows or denies
// anything.
func (s sweeper) isExpired(secret *v1.Secret, now time.Time) bool {
	now = now.Add(-clockMargin)
	if expires, ok := pki.TokenExpiry(secret); ok {
		return now.After(expires)
	}
	if r, ok := pki.ParseRevocation(secret); ok {
		return now.After(r.After().Add(s.life)) // the last revoked certificate has expired
	}
	if c, ok := pki.ParseClaim(secret); ok {
		// Without a Node, the claim is still needed: it identifies the certificates to revoke when
		// another machine gets the name.
		return c.IsExpired(now) && s.nodeExists(c.Node) || now.After(c.At.Add(s.life))
	}
	return false
}

// RunSweeper deletes records of tokens, claims and revocations that no longer have an effect, until
// ctx ends. The client c acts as the system user and writes only during the leader's term.
// certificateLife is the lifetime of a node's certificate.
func (r *Revocations) RunSweeper(ctx context.Context, c *client.Client, certificateLife time.Duration) error {
	return sweeper{
		life: certificateLife,
		listSecrets: func() (secrets []*v1.Secret) {
			for _, o := range r.secrets.List() {
				if secret, ok := o.(*v1.Secret); ok && secret.Namespace == pki.TokenNamespace {
					secrets = append(secrets, secret)
				}
			}
			return secrets
		},
		nodeExists: func(node string) bool { _, ok, err := r.nodes.GetByKey(node); return ok && err == nil },
		removeSecret: func(ctx context.Context, secret *v1.Secret) error {
			err := client.Delete[*v1.Secret](ctx, c, secret.Namespace, secret.Name, metav1.DeleteOptions{
				Preconditions: &metav1.Preconditions{UID: &secret.UID, ResourceVersion: &secret.ResourceVersion},
			})
			if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
				return nil // the record has changed; the next sweep checks it again
			}
			if err == nil {
				r.log.Info("record without effect removed", "secret", secret.Namespace+"/"+secret.Name, "type",
					secret.Type)
			}
			return err
		},
	}.runSweeps(ctx)
}
