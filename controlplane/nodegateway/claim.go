package nodegateway

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
)

// A node name belongs to one machine from the start of its enrolment. The enrolment first creates a
// claim record for the name, which fails if one exists. It then checks whether the Node exists. The
// commit that creates the Node deletes the claim. Of two concurrent enrolments of a new name, one
// is refused, and none can happen between the other's claim and its Node.

// NodeCompanions returns the changes to commit together with the creation or deletion of a Node. A
// creation deletes the claim on the name. A deletion writes the revocation of the node's
// certificates.
func NodeCompanions(obj api.Object, made bool, now time.Time) []api.Companion {
	node := obj.GetName()
	out := []api.Companion{{Object: pki.Claim{Node: node}.Record(), Next: func(api.Object) api.Object { return nil }}}
	if made {
		return out
	}
	r := pki.NewRevocation(node, now)
	r.UID = string(obj.GetUID())
	return append(out, api.Companion{Object: r.Record(), Next: func(stored api.Object) api.Object {
		have, _ := stored.(*v1.Secret)
		if next := revokedBy(have, r); next != nil {
			return next
		}
		return stored
	}})
}

// claim reserves the node name for the machine with the given public key, until its Node exists. It
// returns the claim record if this call created or replaced it, and nil if the machine had it
// already.
func (j *join) claim(ctx context.Context, key string, grant pki.Grant) (made *v1.Secret, err error) {
	for range spendTries {
		made, err = j.tryClaim(ctx, key, grant)
		if err == nil || !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err) {
			break
		}
	}
	if err != nil && status.Code(err) == codes.Unknown {
		err = status.Errorf(codes.Unavailable, "fleet: claim the name %s: %v", j.name, err)
	}
	return made, err
}

func (j *join) tryClaim(ctx context.Context, key string, grant pki.Grant) (*v1.Secret, error) {
	now := time.Now()
	mine := pki.Claim{Node: j.name, Key: key, At: now}.Record()
	have, err := client.Get[*v1.Secret](ctx, j.api, pki.TokenNamespace, mine.Name)
	if apierrors.IsNotFound(err) {
		return client.Create(ctx, j.api, mine)
	}
	if err != nil {
		return nil, err
	}
	was, ok := pki.ClaimOf(have)
	other := ok && was.Key != key
	if other && !was.Ended(now) && !grant.Replace {
		return nil, j.deny("another machine is joining under this name", codes.PermissionDenied,
			"fleet: another machine joins as %s since %s: "+
				"wait until %s, or let this one have the name by a token of 'kctl cluster token create --names %s --replace'",
			j.name, was.At.Format(time.RFC3339), was.At.Add(pki.ClaimLife).Format(time.RFC3339), j.name)
	}
	// The other machine's claim has expired, or the token allows replacement. Certificates issued
	// to that machine must be revoked. The claim of a replaced Node can outlast its validity,
	// because the Node existed all along; its certificate stays valid.
	if other {
		if err := j.vacant(ctx, grant); err != nil {
			return nil, err
		}
		if err := j.srv.record(ctx, pki.NewRevocation(j.name, now)); err != nil {
			return nil, status.Errorf(codes.Unavailable, "fleet: revoke what was given to another %s: %v", j.name, err)
		}
	}
	next := have.DeepCopy()
	next.Type, next.Data = mine.Type, mine.Data
	stored, err := client.Update(ctx, j.api, next)
	if ok && was.Key == key {
		return nil, err // a failed attempt must not delete the claim for a concurrent, successful one of the same machine
	}
	return stored, err
}

// unclaim deletes the claim record that a refused join had created; made may be nil.
func (j *join) unclaim(ctx context.Context, made *v1.Secret) {
	if made == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	uid, rev := made.UID, made.ResourceVersion
	err := client.Delete[*v1.Secret](ctx, j.api, made.Namespace, made.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &rev},
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		j.srv.cfg.Log.Warn("a name stays claimed for some minutes though its join was refused", "node", j.name, "err", err)
	}
}

// deny refuses a join that has a valid token. Unlike refuse, it returns the reason to the client.
func (j *join) deny(why string, code codes.Code, format string, args ...any) error {
	_ = j.refuse(errors.New(why))
	return status.Errorf(code, format, args...)
}
