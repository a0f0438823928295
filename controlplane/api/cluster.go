package api

// The paths of the control plane itself, beside the resources. Who calls them is
// authorized for the path, as for every path that is no resource.
const (
	PathClusterStatus = "/cluster/status" // GET: ClusterStatus
	// PathClusterCertificates answers GET with ClusterCertificates.
	PathClusterCertificates = "/cluster/certificates"
	// PathClusterKeys answers GET with ClusterKeys; POST ClusterRotate begins, hastens or gives up an exchange of a key.
	PathClusterKeys = "/cluster/keys"
	// PathClusterKubeconfig answers POST ClusterKubeconfig with ClusterKubeconfigResult.
	PathClusterKubeconfig = "/cluster/kubeconfig"
	// GET: when the answering replica heard each of its nodes last, in Unix milliseconds
	PathClusterHeartbeats = "/cluster/heartbeats"
	PathClusterRevoke     = "/cluster/revoke"    // POST: the certificates of a node are good no more
	PathClusterTokens     = "/cluster/tokens"    // POST: a join token
	PathClusterMembers    = "/cluster/members"   // GET: the members; POST: ClusterJoin; DELETE below it: remove one
	PathClusterStepDown   = "/cluster/step-down" // POST: ClusterStepDown
	PathClusterCompact    = "/cluster/compact"   // POST: ClusterCompact
	// POST: the file, with HeaderBackupSum behind it. All secrets are in it: who may
	// get every path, as a monitoring system may, must not have it for that.
	// recipient, which may be repeated, seals it by age to that recipient instead of under the store's key.
	PathClusterBackup = "/cluster/backup"
	PathClusterVerify = "/cluster/backup/verify" // POST a file: ClusterBackup
	// PathClusterSupport answers POST ClusterSupport with a ClusterSupportPart. A daemon's log says much of what clients do: as
	// with backups, who may get every path must not have it for that.
	PathClusterSupport = "/cluster/support"
)

// ClusterRevoke asks that the certificates of a node are good no more.
type ClusterRevoke struct {
	Node string `json:"node"`
}

// ClusterToken asks for a join token. What is left out: a day for nodes and an
// hour for replicas, one use or as many as there are names, under any name.
type ClusterToken struct {
	Role    string   `json:"role"` // "node" or "controlplane"
	TTL     string   `json:"ttl,omitempty"`
	Uses    int      `json:"uses,omitempty"`
	Names   []string `json:"names,omitempty"`   // of those who may join with it
	Replace bool     `json:"replace,omitempty"` // also where a Node of the name exists
}

// ClusterTokenResult is a new join token.
type ClusterTokenResult struct {
	Token string `json:"token"`
}

// HeaderBackupSum is the trailer of a backup: the SHA-256 of the file, in hex.
const HeaderBackupSum = "Keelson-Sha256"

// BackupMagic is what every backup begins with.
const BackupMagic = "keelback"

// BackupSealedMark is in the first kilobyte of a backup that is encrypted, and of no other.
const BackupSealedMark = `"KeyID":"`

// TrialPrefix is what the name of every folder and file begins with that is made for a look at a backup; os.MkdirTemp's
// digits follow. What has such a name and is in no process's use any more is removed: no person gives such a name.
const TrialPrefix = ".keelson-trial-"

// ClusterStatus is what is known of the control plane. Sizes are in bytes.
type ClusterStatus struct {
	Cluster string `json:"cluster"`
	ID      string `json:"id"` // tells this cluster from all others
	// Incarnation is larger after each recovery and restore of the cluster; 0 before the first, and from a release that does
	// not know incarnations.
	Incarnation  uint64 `json:"incarnation,omitempty"`
	Answered     string `json:"answeredBy"` // the replica
	Leader       string `json:"leader"`     // "" when none is known
	Term         uint64 `json:"term"`
	CommitIndex  uint64 `json:"commitIndex"`
	Revision     uint64 `json:"revision"`
	Compacted    uint64 `json:"compacted"` // history up to and including this revision is gone
	Keys         int    `json:"keys"`
	Bytes        int64  `json:"bytes"`
	HistoryBytes int64  `json:"historyBytes"`
	Quota        int64  `json:"quota"`        // of both together; 0 = none
	FeatureLevel uint32 `json:"featureLevel"` // of the forms that may be stored
	// Work is what the leader says of the parts of its work: WorkWaiting, WorkBegun, or nothing where it is not asked or
	// is of a release that does not say. Failing are those that failed lately, in the order of their names.
	Work    string        `json:"work,omitempty"`
	Failing []ClusterPart `json:"failing,omitempty"`
	// Schedulers are the schedulerNames that the leader's scheduler serves; none where it is of a release that does not say.
	Schedulers []string `json:"schedulers,omitempty"`

	// Autopilot is what the leader says of the replacement of dead replicas; nil where it is not asked, or does not do that.
	Autopilot *ClusterAutopilot `json:"autopilot,omitempty"`

	Alarms  []ClusterAlarm  `json:"alarms"`
	Members []ClusterMember `json:"members"`
}

// What a leader says of its work.
const (
	WorkWaiting = "waiting" // it leads and reads the cluster first
	WorkBegun   = "begun"
)

// ClusterPart is a part of the leader's work that failed.
type ClusterPart struct {
	Name  string `json:"name"`        // "scheduler", a controller's name ...
	Since int64  `json:"sinceUnixMs"` // of the last failure
	Error string `json:"error"`
}

// ClusterAutopilot says how standbys take the places of voters that are dead.
type ClusterAutopilot struct {
	After   int64             `json:"afterMs"`                      // for how long a voter has to be silent
	State   string            `json:"state"`                        // what is done, or why nothing is
	Blocked int64             `json:"blockedSinceUnixMs,omitempty"` // since when somebody is to be replaced and cannot be
	Done    []ClusterReplaced `json:"done,omitempty"`               // the last ones, oldest first
}

// ClusterReplaced is a voter that was replaced.
type ClusterReplaced struct {
	Dead    string `json:"dead"`
	Standby string `json:"standby"` // who has its vote since
	At      int64  `json:"atUnixMs"`
}

// ClusterMember is one replica.
type ClusterMember struct {
	Name    string `json:"name"`
	Address string `json:"address"` // for the other replicas
	Voter   bool   `json:"voter"`   // false for one that is catching up, and for a standby
	Leader  bool   `json:"leader"`
	Ready   string `json:"ready"` // "yes" or why not

	// Applied is the last log entry that the replica is known to have applied,
	// 0 when nothing is known; Lag is how many more the group has committed.
	Applied uint64 `json:"appliedIndex"`
	Lag     uint64 `json:"lag"`
	// Contact is how many milliseconds ago it was last heard; -1 when never.
	Contact int64 `json:"lastContactMs"`

	// What only the replica itself knows; zero when it does not answer.
	Version  string `json:"version,omitempty"`
	Disk     int64  `json:"diskBytes,omitempty"`
	Watchers int    `json:"watchers,omitempty"`
	// FeatureLevel is the highest that its release understands.
	FeatureLevel uint32 `json:"featureLevel,omitempty"`
	// Standby says that it has no vote and waits for that of a replica that dies.
	Standby bool `json:"standby,omitempty"`
	// Backups are those that it makes by itself; nil when it makes none, or is of a release that makes none.
	Backups *ClusterMemberBackups `json:"backups,omitempty"`
	// StaleKeys says which key it has of before an exchange, and what to do; "" when it has those of the others. StaleSince is
	// since when it knows, in milliseconds since 1970.
	StaleKeys  string `json:"staleKeys,omitempty"`
	StaleSince int64  `json:"staleSinceUnixMs,omitempty"`
}

// ClusterMemberBackups says how the backups go that a replica makes by its schedule. Times are 0 when none exists.
type ClusterMemberBackups struct {
	Last     int64  `json:"lastUnixMs,omitempty"`  // the newest good one
	Next     int64  `json:"nextUnixMs,omitempty"`  // when the next one is due
	Failures int    `json:"failures,omitempty"`    // attempts since the last good one
	Since    int64  `json:"sinceUnixMs,omitempty"` // of the first of them
	Error    string `json:"error,omitempty"`       // of the last of them
}

// ClusterAlarm is a condition that a person should know of.
type ClusterAlarm struct {
	Kind    string `json:"kind"`             // "space", "diverged", "unreadable", "too old", "backups", "autopilot", "elections", "rotation", "stale keys", "abandoned", "not renewed" or "expiring"
	Member  string `json:"member,omitempty"` // the replica it is about; "" = all
	Since   int64  `json:"sinceUnixMs"`
	Message string `json:"message"`
	Remedy  string `json:"remedy"` // what to do
}

// ClusterJoin asks for membership.
type ClusterJoin struct {
	Name    string `json:"name"`
	Address string `json:"address"` // host:port of its peer listener
	// Standby asks for it without a vote. A release that knows no standbys refuses the field.
	Standby bool `json:"standby,omitempty"`
}

// ClusterStepDown hands the leadership over, to a certain replica or to the best one.
type ClusterStepDown struct {
	To string `json:"to,omitempty"`
}

// ClusterStepDownResult says who led and who leads.
type ClusterStepDownResult struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// ClusterCompact forgets history up to and including a revision; 0 = all of it.
type ClusterCompact struct {
	Revision uint64 `json:"revision"`
}

// ClusterCompactResult is the state of the history afterwards.
type ClusterCompactResult struct {
	Compacted    uint64 `json:"compacted"`
	HistoryBytes int64  `json:"historyBytes"`
}

// ClusterBackup describes a backup that is whole.
type ClusterBackup struct {
	Cluster  string `json:"cluster"` // the ID of the cluster it is of
	Revision uint64 `json:"revision"`
	Created  int64  `json:"createdUnixMs"`
	Keys     int    `json:"keys"`
	Bytes    int64  `json:"bytes"`
	Format   uint32 `json:"format"`
	Sealed   bool   `json:"sealed"` // encrypted: a key of the cluster is needed to restore it
	// KeyID is that of the key in a key file that opens it; "" when it is in clear.
	KeyID string `json:"keyID,omitempty"`
	// Recipients are the kinds of those to whom age has sealed it, one each; none where it is not sealed by age.
	Recipients []string `json:"recipients,omitempty"`
	// FeatureLevel is that of the forms in it: a release that understands less does not restore it.
	FeatureLevel uint32 `json:"featureLevel,omitempty"`
	// Kinds are what is in it, in the order of their places; nil where the file could not be opened, or was not.
	Kinds []ClusterBackupKind `json:"kinds,omitempty"`
}

// ClusterBackupKind is how many objects of a resource a backup holds.
type ClusterBackupKind struct {
	Place    string `json:"place"`              // what their keys begin with
	Group    string `json:"group,omitempty"`    // of the resource; "" for the core group
	Resource string `json:"resource,omitempty"` // "" for records of the cluster itself
	// Version is the one in which they are stored, and Hidden says that no client may read them; both are known only to who
	// serves the backup.
	Version  string `json:"version,omitempty"`
	Hidden   bool   `json:"hidden,omitempty"`
	Objects  int    `json:"objects"`
	Expiring int    `json:"expiring,omitempty"` // how many of them end by themselves, as Events do
	Bytes    int64  `json:"bytes"`              // of keys and values
}

// ClusterSupport asks what a replica knows of itself; "" = the one that is asked.
type ClusterSupport struct {
	Replica string `json:"replica,omitempty"`
}

// ClusterSupportPart is what a replica tells of itself to who has to find out what is wrong.
type ClusterSupportPart struct {
	Replica    string            `json:"replica"`
	Version    string            `json:"version"`
	Go         string            `json:"go"`
	Goroutines int               `json:"goroutines"`
	Flags      map[string]string `json:"flags,omitempty"`
	Log        string            `json:"log"`               // the last lines
	Metrics    string            `json:"metrics"`           // in Prometheus' form
	Problem    string            `json:"problem,omitempty"` // why something is missing
}

// AgentLogPath is where the API of a node has the last lines of its agent's log.
const AgentLogPath = "/logs/keelson-agent.log"

// AgentSettingsPath is where it has the agent's settings, a line for each. Agents of releases before have none there.
const AgentSettingsPath = "/logs/keelson-agent-settings.txt"

// ClusterCertificates are the certificates of a cluster, without those that users and workloads had signed.
type ClusterCertificates struct {
	Certificates []ClusterCertificate `json:"certificates"`
	// Silent are the replicas that did not say what they have, with the reason.
	Silent map[string]string `json:"silent,omitempty"`
}

// ClusterCertificate is a certificate as its holder shows it. Times are in seconds since 1970.
type ClusterCertificate struct {
	Use       string `json:"use"`    // what its holder shows it for, or what an authority signs
	Holder    string `json:"holder"` // the replica or the node
	Node      bool   `json:"node,omitempty"`
	Authority bool   `json:"authority,omitempty"`
	Signs     bool   `json:"signs,omitempty"` // of an authority: it signs new certificates, and is not only believed
	Subject   string `json:"subject"`
	Key       string `json:"key"` // the first 16 characters of the SHA-256 of the public key, as peer-ca shows it
	Begins    int64  `json:"begins"`
	Expires   int64  `json:"expires"`
	Renews    int64  `json:"renews,omitempty"` // when its holder makes the next one by itself; 0 = never
}

// ClusterRotate asks for the exchange of a key that all replicas share: cluster-ca, peers-ca, service-account-key or
// encryption-key.
type ClusterRotate struct {
	Kind string `json:"kind,omitempty"`
	// Keep is for how long the former key is believed once the new one signs, a duration; "" = what the kind needs.
	Keep string `json:"keep,omitempty"`
	// Abort gives up the exchange that is under way, before the new key is used.
	Abort bool `json:"abort,omitempty"`
	// Force has the exchange that is under way wait neither for replicas that do not answer, once the new key is
	// believed by all, nor for what was signed by the former key, nor for nodes that are away.
	Force bool `json:"force,omitempty"`
	// Dismiss is a removed replica of which nothing is to be told any more, since what it had of the keys is destroyed. It
	// stands alone. A release that does not know it refuses the field.
	Dismiss string `json:"dismiss,omitempty"`
}

// ClusterKeys are the keys that all replicas share, by their ids, and the exchange of one that was last.
type ClusterKeys struct {
	Rotation *ClusterRotation   `json:"rotation,omitempty"`
	Replicas []ClusterKeyHolder `json:"replicas"`
	Waiting  []string           `json:"waiting,omitempty"` // who or what the exchange waits for
	// Removed are replicas that were members, and what of the keys that they had is good still.
	Removed []ClusterRemoved `json:"removed,omitempty"`
}

// ClusterRemoved is a replica that is a member no more. At is in milliseconds since 1970.
type ClusterRemoved struct {
	Name  string   `json:"name"`
	At    int64    `json:"atUnixMs"`
	Kinds []string `json:"kinds"` // of keys that it had and that are in use or believed
}

// ClusterKubeconfig asks for what a kubeconfig is made of. CSR, in PEM, asks for a client certificate in the place of the
// one by which the caller is known; only its key counts.
type ClusterKubeconfig struct {
	CSR []byte `json:"csr,omitempty"`
}

// ClusterKubeconfigResult has PEM: the authorities to believe, and a certificate where one was asked for.
type ClusterKubeconfigResult struct {
	CA          []byte `json:"ca"`
	Certificate []byte `json:"certificate,omitempty"`
}

// ClusterRotation is the exchange of one key. Steps are trust, use, wait, serve (of cluster-ca alone), forget, done, and aborted. Times are in
// milliseconds since 1970; Until is 0 before the step wait.
type ClusterRotation struct {
	Kind    string `json:"kind"`
	New     string `json:"new"`
	Old     string `json:"old"`
	Step    string `json:"step"`
	By      string `json:"by,omitempty"`
	Started int64  `json:"startedUnixMs"`
	Since   int64  `json:"sinceUnixMs"`
	Until   int64  `json:"untilUnixMs,omitempty"`
	Force   bool   `json:"force,omitempty"`
}

// ClusterKeyHolder is a replica with the keys that it goes by. Problem says why it did not tell them.
type ClusterKeyHolder struct {
	Name    string           `json:"name"`
	Problem string           `json:"problem,omitempty"`
	Keys    []ClusterKeyHeld `json:"keys,omitempty"`
	// Nodes are those that have their session with it, and Users whose certificates by the former CA it has seen, by serial
	// number; both are told among replicas while the cluster's CA is exchanged.
	Nodes []ClusterNodeKeys      `json:"nodes,omitempty"`
	Users map[string]ClusterUser `json:"users,omitempty"`
}

// ClusterNodeKeys are the authorities by which a node goes. Silent: its release does not say.
type ClusterNodeKeys struct {
	Name     string   `json:"name"`
	Silent   bool     `json:"silent,omitempty"`
	Believes []string `json:"believes,omitempty"`
	Shows    []string `json:"shows,omitempty"`
}

// ClusterUser is whose client certificate was seen. Times are in milliseconds since 1970.
type ClusterUser struct {
	Name string `json:"name"`
	Ends int64  `json:"endsUnixMs"`
	Seen int64  `json:"seenUnixMs"`
}

// ClusterKeyHeld are the keys of one kind. Problem says why the replica cannot take another one.
type ClusterKeyHeld struct {
	Kind     string   `json:"kind"`
	Signs    string   `json:"signs,omitempty"`
	Believes []string `json:"believes,omitempty"`
	Serves   string   `json:"serves,omitempty"` // of cluster-ca: by which the certificate of the API is
	Problem  string   `json:"problem,omitempty"`
}
