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

// A name is one machine's from the moment at which it enrols. First it claims the name, by a record that is made only
// where none exists; then the fleet looks whether the Node exists. The record goes in the commit that makes the Node.
// So of two that enrol a new name at once one is told no, and neither gets in between the claim and the Node of the
// other.

// NodeCompanions are what changes in the commit that makes or removes a Node: a Node that is made ends the claim on
// its name; one that is removed leaves the record that revokes its certificates.
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

// claim makes the name that of the machine with a key, until its Node is there. made is the record when it is new
// with this join; one that the same machine made before is left.
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
	// It had its time, or has to give way. What it was given must not count beside what this one gets. A claim on the name of
	// a Node that was replaced outlasts its time: the Node has been there all along, and its certificate is not to suffer.
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
		return nil, err // whichever try of this machine fails, it does not take the claim from another one that succeeds
	}
	return stored, err
}

// unclaim gives a name back that was claimed for a join which is refused.
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

// deny refuses a join whose token is good: its bearer is told why.
func (j *join) deny(why string, code codes.Code, format string, args ...any) error {
	_ = j.refuse(errors.New(why))
	return status.Errorf(code, format, args...)
}
