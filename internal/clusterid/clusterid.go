// Package clusterid compares the identities of clusters. Recovering a cluster from one replica, or
// restoring it from a backup, starts a new incarnation of it: replicas that keep the data of an
// earlier incarnation are abandoned. Replicas, agents and kctl send their identity with each
// request and refuse a partner of an earlier incarnation.
package clusterid

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Header is the HTTP header, and Key the gRPC metadata key, that carries an identity in requests
// and responses. A release that does not support identities sends neither; its requests are
// accepted.
const (
	Header = "Keelson-Identity"
	Key    = "keelson-identity"
)

const (
	// maxIncarnation is the largest incarnation: JSON numbers are exact up to it.
	maxIncarnation = 1<<53 - 1
	maxText        = 512 // bytes of an encoded identity
)

// Identity identifies one incarnation of one cluster.
type Identity struct {
	Cluster string // the cluster's ID; "" = unknown
	// Incarnation is 0 until the cluster is recovered or restored for the first time. Later
	// incarnations are larger. It is the time of the recovery or restore, in milliseconds since
	// 1970, unless a clock was wrong.
	Incarnation uint64
}

// String encodes the identity as CLUSTER/INCARNATION.
func (i Identity) String() string { return i.Cluster + "/" + strconv.FormatUint(i.Incarnation, 10) }

var errMalformed = errors.New("malformed cluster identity: want CLUSTER/INCARNATION")

// Parse decodes what String encodes.
func Parse(text string) (Identity, error) {
	at := strings.LastIndexByte(text, '/')
	if at < 0 || len(text) > maxText {
		return Identity{}, errMalformed
	}
	n, err := strconv.ParseUint(text[at+1:], 10, 64)
	if err != nil || n > maxIncarnation {
		return Identity{}, errMalformed
	}
	return Identity{text[:at], n}, nil
}

// Before reports whether i is an earlier incarnation of the same cluster as other.
func (i Identity) Before(other Identity) bool {
	return i.Cluster != "" && i.Cluster == other.Cluster && i.Incarnation < other.Incarnation
}

// Next returns the incarnation of a cluster that is recovered or restored at time now. latest is
// the largest incarnation known so far; the result is larger.
func Next(latest uint64, now time.Time) uint64 {
	return min(max(latest+1, uint64(max(0, now.UnixMilli()))), maxIncarnation)
}

// StartTime returns the time of the recovery or restore, formatted as RFC 3339 in UTC.
func (i Identity) StartTime() string {
	return time.UnixMilli(int64(i.Incarnation)).UTC().Format(time.RFC3339)
}

// AbandonedError is the error for a replica of a cluster that has a later incarnation.
type AbandonedError struct {
	Replica string   // name or address
	Newest  Identity // the latest known identity of the cluster
}

func (e *AbandonedError) Error() string {
	return fmt.Sprintf("replica %s has data of cluster %s from before its recovery or restore of %s and is abandoned: use another replica, "+
		"and on the machine of this one stop it and run 'keelson-controlplane rebuild --server ADDRESS-OF-A-RECOVERED-REPLICA'",
		e.Replica, e.Newest.Cluster, e.Newest.StartTime())
}
