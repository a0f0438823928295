package accept

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/retry"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/internal/wakeup"
)

// Revocations revokes the certificates of nodes and reads which certificates are revoked.
//
// A node's certificates are revoked by a record, which is a Secret. It is written by an
// administrator's command, or here when a Node is deleted. Every replica watches the records. It
// closes the connections with revoked certificates; on new connections with such a certificate, a
// client can only enroll.
//
// Its methods are safe for concurrent use. Create it with NewRevocations.
type Revocations struct {
	client  *client.Client // as the system user
	secrets cache.Indexer
	nodes   cache.Indexer
	log     *slog.Logger

	mu      sync.Mutex
	deleted []pki.Revocation // revocations for deleted Nodes that are not written yet
	wake    wakeup.Signal    // signaled when deleted has grown
}

// NewRevocations returns the stored revocations. It registers handlers with the informers, which
// must not run yet. The client c acts as the system user. nodeDeleted is called when a Node is
// deleted, before the revocation of its certificates is written.
func NewRevocations(c *client.Client, informers *client.Informers, connections *NodeConnections,
	nodeDeleted func(node string), log *slog.Logger) *Revocations {
	secrets, nodes := client.Informer[*v1.Secret](informers), client.Informer[*v1.Node](informers)
	r := &Revocations{client: c, secrets: secrets.GetIndexer(), nodes: nodes.GetIndexer(), log: log,
		wake: wakeup.New()}
	closeRevoked := func(o any) {
		secret, _ := o.(*v1.Secret)
		if revocation, ok := pki.ParseRevocation(secret); ok {
			connections.closeRevoked(revocation)
		}
	}
	if _, err := secrets.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: closeRevoked, UpdateFunc: func(_, o any) { closeRevoked(o) }}); err != nil {
		panic(fmt.Sprintf("fleet: watch Secrets: %v", err)) // never happens, because the informer has not started
	}
	if _, err := nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{DeleteFunc: func(o any) {
		if t, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = t.Obj
		}
		if node, ok := o.(*v1.Node); ok {
			nodeDeleted(node.Name)
			r.queueDeletedNode(node)
		}
	}}); err != nil {
		panic(fmt.Sprintf("fleet: watch Nodes: %v", err)) // never happens, because the informer has not started
	}
	return r
}

// readCached returns the revocation of a node from the informer cache.
func (r *Revocations) readCached(node string) (pki.Revocation, bool) {
	o, ok, err := r.secrets.GetByKey(pki.TokenNamespace + "/" + pki.RevocationName(node))
	if err != nil || !ok {
		return pki.Revocation{}, false
	}
	secret, _ := o.(*v1.Secret)
	return pki.ParseRevocation(secret)
}

// IsRevoked reports whether a node's certificate is revoked, according to the informer cache.
func (r *Revocations) IsRevoked(node string, cert *x509.Certificate) bool {
	revocation, ok := r.readCached(node)
	return ok && revocation.Covers(cert)
}

// IsRevokedInStore reads the revocation record of a node from the store, and reports whether it
// covers the certificate.
func (r *Revocations) IsRevokedInStore(ctx context.Context, node string, cert *x509.Certificate) (bool, error) {
	revocation, ok, err := r.readStored(ctx, node)
	return ok && revocation.Covers(cert), err
}

// readStored reads the revocation record of a node from the store. ok is false if there is no
// record.
func (r *Revocations) readStored(ctx context.Context, node string) (revocation pki.Revocation, ok bool, err error) {
	secret, err := client.Get[*v1.Secret](ctx, r.client, pki.TokenNamespace, pki.RevocationName(node))
	if apierrors.IsNotFound(err) {
		return revocation, false, nil
	}
	if err != nil {
		return revocation, false, status.Errorf(codes.Unavailable, "fleet: read the revocation record of node %s: %v",
			node, err)
	}
	revocation, ok = pki.ParseRevocation(secret)
	return revocation, ok, nil
}

// queueDeletedNode queues a revocation of the certificates of a deleted Node.
func (r *Revocations) queueDeletedNode(node *v1.Node) {
	revocation := pki.NewRevocation(node.Name, time.Now())
	revocation.UID = string(node.UID)
	r.mu.Lock()
	r.deleted = append(r.deleted, revocation)
	r.mu.Unlock()
	r.wake.Send()
}

// RevokeDeletedNodes writes the queued revocations of deleted Nodes until ctx ends. Every replica
// tries to write them; the first write takes effect.
func (r *Revocations) RevokeDeletedNodes(ctx context.Context) error {
	pause := backoff.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.5}
	for {
		r.mu.Lock()
		queued := r.deleted
		r.deleted = nil
		r.mu.Unlock()
		for i, revocation := range queued {
			err := r.recordRevocation(ctx, revocation)
			if err == nil {
				pause.Reset()
				continue
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			r.log.Warn("the certificates of a deleted node are not revoked yet", "node", revocation.Node, "err", err)
			r.mu.Lock()
			r.deleted = append(queued[i:], r.deleted...)
			r.mu.Unlock()
			if err := wait.Delay(ctx, pause.Next()); err != nil {
				return err
			}
			break
		}
		r.mu.Lock()
		left := len(r.deleted)
		r.mu.Unlock()
		if left > 0 {
			continue
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// extendRevocation returns the record stored, which may be nil, extended by the revocation r. It
// returns nil if the record already contains r.
func extendRevocation(stored *v1.Secret, r pki.Revocation) *v1.Secret {
	if stored == nil {
		return r.Record()
	}
	if previous, ok := pki.ParseRevocation(stored); ok {
		if r.UID != "" && previous.UID == r.UID {
			return nil
		}
		r = r.Extend(previous)
	}
	next := stored.DeepCopy()
	next.Type, next.Data = pki.RevocationSecretType, r.Record().Data
	return next
}

// RevokeNode revokes all certificates that were issued to a node up to now, for an administrator.
func (r *Revocations) RevokeNode(ctx context.Context, node string) error {
	revocation := pki.NewRevocation(node, time.Now())
	revocation.Named = true
	return r.recordRevocation(ctx, revocation)
}

// recordRevocation adds a revocation to the node's record. It does nothing if the record already
// contains the revocation for the same deleted Node.
func (r *Revocations) recordRevocation(ctx context.Context, revocation pki.Revocation) error {
	c := r.client.ForClusterVerb()
	return retry.OnConflict(math.MaxInt, func() (again bool, err error) { // repeated until ctx ends
		stored, err := client.Get[*v1.Secret](ctx, c, pki.TokenNamespace, pki.RevocationName(revocation.Node))
		switch {
		case apierrors.IsNotFound(err):
			_, err = client.Create(ctx, c, revocation.Record())
		case err == nil:
			next := extendRevocation(stored, revocation)
			if next == nil {
				return false, nil
			}
			_, err = client.Update(ctx, c, next)
		}
		if err == nil {
			r.log.Info("certificates of a node revoked", "node", revocation.Node, "until",
				revocation.At.UTC().Format(time.RFC3339))
			return false, nil
		}
		conflict := apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
		return conflict && ctx.Err() == nil, err
	})
}
