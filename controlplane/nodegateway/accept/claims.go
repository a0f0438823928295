package accept

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
	"keelson.dev/keelson/internal/retry"
)

// A node name belongs to one machine from the start of its enrollment. The enrollment first creates
// a claim on the name (pki.Claim), which fails if one exists. Then it checks whether the Node
// exists. The commit that creates the Node deletes the claim. So of two concurrent enrollments with
// a new name, one is refused. No enrollment can happen between the claim of another machine and the
// creation of its Node.

// NodeCompanions returns the changes that are committed together with the creation or deletion of
// the Node obj. A creation deletes the claim on the name. A deletion writes the revocation of the
// node's certificates.
func NodeCompanions(obj api.Object, created bool, now time.Time) []api.Companion {
	node := obj.GetName()
	companions := []api.Companion{{Object: pki.Claim{Node: node}.Record(),
		Next: func(api.Object) api.Object { return nil }}}
	if created {
		return companions
	}
	r := pki.NewRevocation(node, now)
	r.UID = string(obj.GetUID())
	return append(companions, api.Companion{Object: r.Record(), Next: func(stored api.Object) api.Object {
		secret, _ := stored.(*v1.Secret)
		if next := extendRevocation(secret, r); next != nil {
			return next
		}
		return stored
	}})
}

// claimName reserves the node name for the machine whose public key has the hash key, until its
// Node exists. It returns the claim record if this call has created or replaced it. It returns nil
// if the machine already had the claim.
func (j *join) claimName(ctx context.Context, key string, grant pki.Grant) (claim *v1.Secret, err error) {
	err = retry.OnConflict(maxSpendTries, func() (again bool, err error) {
		claim, err = j.tryClaimName(ctx, key, grant)
		return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err), err
	})
	if err != nil && status.Code(err) == codes.Unknown {
		err = status.Errorf(codes.Unavailable, "fleet: claim the name %s: %v", j.name, err)
	}
	return claim, err
}

func (j *join) tryClaimName(ctx context.Context, key string, grant pki.Grant) (*v1.Secret, error) {
	now, c := time.Now(), j.enroller.client
	claim := pki.Claim{Node: j.name, Key: key, At: now}.Record()
	stored, err := client.Get[*v1.Secret](ctx, c, pki.TokenNamespace, claim.Name)
	if apierrors.IsNotFound(err) {
		return client.Create(ctx, c, claim)
	}
	if err != nil {
		return nil, err
	}
	previous, ok := pki.ParseClaim(stored)
	isOther := ok && previous.Key != key
	if isOther && !previous.IsExpired(now) && !grant.Replace {
		return nil, j.denyJoin("another machine is joining under this name", codes.PermissionDenied,
			"fleet: another machine joins as %s since %s: "+
				"wait until %s, or enroll this machine with a token of "+
				"'kctl cluster token create --names %s --replace'",
			j.name, previous.At.Format(time.RFC3339), previous.At.Add(pki.ClaimLife).Format(time.RFC3339), j.name)
	}
	// The claim of the other machine has expired, or the token allows replacement. The certificates
	// of that machine must be revoked. This does not apply to the claim of a replaced Node: its
	// certificate stays valid, because the Node existed all the time.
	if isOther {
		if err := j.checkVacancy(ctx, grant); err != nil {
			return nil, err
		}
		if err := j.enroller.revocations.recordRevocation(ctx, pki.NewRevocation(j.name, now)); err != nil {
			return nil, status.Errorf(codes.Unavailable,
				"fleet: revoke the certificates of the other machine named %s: %v", j.name, err)
		}
	}
	next := stored.DeepCopy()
	next.Type, next.Data = claim.Type, claim.Data
	updated, err := client.Update(ctx, c, next)
	if ok && previous.Key == key {
		// A failed attempt must not delete the claim: another attempt of the same machine may
		// succeed at the same time.
		return nil, err
	}
	return updated, err
}

// releaseClaim deletes the claim record that a refused join had created. claim may be nil.
func (j *join) releaseClaim(ctx context.Context, claim *v1.Secret) {
	if claim == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	uid, revision := claim.UID, claim.ResourceVersion
	err := client.Delete[*v1.Secret](ctx, j.enroller.client, claim.Namespace, claim.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &revision},
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		j.enroller.log.Warn("a name stays claimed for some minutes though its join was refused", "node", j.name, "err",
			err)
	}
}

// denyJoin refuses a join whose token is valid. It returns the error with the reason, for the
// client.
func (j *join) denyJoin(reason string, code codes.Code, format string, args ...any) error {
	_ = j.refuseJoin(errors.New(reason))
	return status.Errorf(code, format, args...)
}
