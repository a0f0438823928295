package nodegateway

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

// spentEvery is the interval between sweeps. spentMargin is the tolerated difference between the
// clocks of replicas.
const (
	spentEvery  = 10 * time.Minute
	spentMargin = 10 * time.Minute
)

// sweeper deletes the records of tokens, claims and revocations that no longer have an effect.
type sweeper struct {
	secrets func() []*v1.Secret
	exists  func(node string) bool
	life    time.Duration // validity of a node's certificate
	remove  func(context.Context, *v1.Secret) error
}

// run sweeps immediately and then every spentEvery, until ctx ends.
func (s sweeper) run(ctx context.Context) error {
	for {
		now := time.Now()
		for _, one := range s.secrets() {
			if !s.spent(one, now) {
				continue
			}
			if err := s.remove(ctx, one); err != nil && ctx.Err() == nil {
				return err // the leader restarts this component
			}
		}
		if err := wait.Delay(ctx, spentEvery); err != nil {
			return err
		}
	}
}

// spent reports whether a record no longer allows or denies anything.
func (s sweeper) spent(one *v1.Secret, now time.Time) bool {
	now = now.Add(-spentMargin)
	if expires, ok := pki.TokenExpires(one); ok {
		return now.After(expires)
	}
	if r, ok := pki.RevocationOf(one); ok {
		return now.After(r.After().Add(s.life)) // the last revoked certificate has expired
	}
	if c, ok := pki.ClaimOf(one); ok {
		// Without a Node, the claim is still needed: it identifies the certificates to revoke when
		// another machine gets the name.
		return c.Ended(now) && s.exists(c.Node) || now.After(c.At.Add(s.life))
	}
	return false
}

// RunSweeper deletes records without effect until ctx ends. c writes as the system user and is
// fenced with the leader's term.
func (s *Server) RunSweeper(ctx context.Context, c *client.Client) error {
	return sweeper{
		life: s.cfg.CertificateLife,
		secrets: func() (out []*v1.Secret) {
			for _, o := range s.view.stores[kindSecret].List() {
				if secret, ok := o.(*v1.Secret); ok && secret.Namespace == pki.TokenNamespace {
					out = append(out, secret)
				}
			}
			return out
		},
		exists: func(node string) bool { _, ok := s.view.nodeObject(node); return ok },
		remove: func(ctx context.Context, one *v1.Secret) error {
			err := client.Delete[*v1.Secret](ctx, c, one.Namespace, one.Name, metav1.DeleteOptions{
				Preconditions: &metav1.Preconditions{UID: &one.UID, ResourceVersion: &one.ResourceVersion},
			})
			if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
				return nil // the record has changed; the next sweep checks it again
			}
			if err == nil {
				s.cfg.Log.Info("record without effect removed", "secret", one.Namespace+"/"+one.Name, "type", one.Type)
			}
			return err
		},
	}.run(ctx)
}
