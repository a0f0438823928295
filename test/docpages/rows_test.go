package docpages

// commandRow is a command line of the pages with the tests that run it, or the reason why no test
// does.
type commandRow struct {
	line          string
	by            string // comma-separated names of the tests that run the line or an equivalent line
	reason        string
	notOnMachines string // why none of these tests runs it on a machine
	like          string // another line that differs in a name only
}

// Tests on machines, and reasons of several rows.
const (
	machinesTest        = "TestDocsOnMachines"
	machinesUpgradeTest = "TestMachines"
	page                = "TestOperatePage"
	reasonPreparation   = "it builds or boots the machines of the tests: 'make test-vm' runs it first"
	reasonLab           = "it is for a lab on one computer"
	reasonItself        = "it is the test"
	reasonInAPod        = "it runs a container in a pod, whatever the machine"
	pattern             = "it stands for all commands of the program"
)

// commandRows are the command lines of the pages for operators. Inline code that is a prefix of a
// line, such as "kctl cluster up", counts as that line.
var commandRows = []commandRow{
	// install
	{line: "tar -xzf keelson-v1.0.0-linux-amd64.tar.gz && cd keelson-v1.0.0-linux-amd64", by: machinesTest},
	{line: "sudo ./install.sh server --init --advertise-address 192.0.2.11 --init-flag=--replica-token-uses=2",
		by: machinesTest + ", TestPagesMakeThreeReplicas"},
	{line: "sudo ./install.sh server --server 192.0.2.11 --token keelson1.controlplane...", by: machinesTest},
	{line: "sudo ./install.sh agent  --server 192.0.2.11 --token keelson1.node...", by: machinesTest},
	{line: "sudo dpkg -i keelson-v1.0.0-linux-amd64.deb", by: machinesTest},
	{line: "systemctl enable --now keelson-agent", by: "TestAnAgentIsInstalledAndTakenAway, " + machinesTest},
	{line: "kctl cluster up -f cluster.yaml --dry-run", by: machinesTest + ", " + machinesUpgradeTest},
	{line: "kctl cluster up -f cluster.yaml", by: machinesTest + ", " + machinesUpgradeTest},
	{line: "kctl cluster upgrade -f cluster.yaml --to FILE", by: machinesUpgradeTest},
	{line: "kctl cluster add -f cluster.yaml", by: machinesTest + ", " + machinesUpgradeTest},
	{line: "kctl cluster remove w3 -f cluster.yaml", by: machinesUpgradeTest},
	{line: "kctl cluster reset -f cluster.yaml", by: machinesUpgradeTest},
	{line: "kctl cluster remove cp1", by: "TestClusterWithStandbys, " + machinesTest},
	{line: "install.sh --settings FILE", by: "TestSettingsAreBrought, " + machinesTest},
	{line: "systemctl edit keelson-controlplane", by: machinesTest},
	{line: "keelson-agent check", by: "TestCheckOfSettings, TestSettingsThatAreWrong, " + machinesTest},
	{line: "keelson-controlplane check",
		by: "TestSettingsOfTheFile, TestSettingsThatAreGood, TestSettingsThatAreWrong, " + machinesTest},
	{line: "make test-vm", reason: reasonItself},
	{line: "make test-vm-docs", reason: reasonItself},
	{line: "KEEP=DIR make test-vm-docs", reason: reasonItself},
	{line: "make vm-up", reason: reasonPreparation},
	{line: "make vm-down", reason: reasonPreparation},
	{line: "make dist", reason: reasonPreparation},
	{line: "ARCHES=amd64 make dist", reason: reasonPreparation},
	{line: "vagrant up", reason: "it needs libvirt or VirtualBox; TestVagrantfile has Vagrant itself read the file"},
	{line: "/usr/lib/keelson/uninstall.sh", by: "TestAnAgentIsInstalledAndTakenAway, " + machinesUpgradeTest},
	{line: "systemctl stop keelson-agent keelson-pods", by: machinesTest},
	{line: "systemctl start keelson-agent", by: "TestAnAgentIsInstalledAndTakenAway, " + machinesTest},
	{line: "systemctl set-property keelson.slice MemoryMax=...", by: machinesTest},

	// operate
	{line: "make up", reason: "each test on a lab begins with it"},
	{line: "kctl cluster status", by: page + ", " + machinesTest},
	{line: "kctl get nodes", by: page + ", " + machinesTest},
	{line: "kctl get --raw '/readyz?verbose'", by: page + ", " + machinesTest},
	{line: "kctl why node/w2", by: page + ", " + machinesTest},
	{line: "kctl why node/w3", like: "kctl why node/w2"},
	{line: "journalctl -u keelson-controlplane", by: machinesTest},
	{line: "journalctl -u keelson-agent", by: machinesTest},
	{line: "kctl lab status", reason: reasonLab},
	{line: "kctl drain w3 --ignore-daemonsets --delete-emptydir-data", by: page + ", " + machinesTest},
	{line: "kctl get node w3", by: page + ", " + machinesTest},
	{line: "kctl uncordon w3", by: page + ", " + machinesTest},
	{line: "kctl delete node w3", by: "TestClusterCARotates, " + machinesTest},
	{line: "kctl taint node w3 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
		by: "TestAttachedVolumesMove, " + machinesTest},
	{line: "kctl cluster transfer-leader", by: page + ", " + machinesTest},
	{line: "kctl cluster member list", by: page + ", " + machinesTest},
	{line: "systemctl stop keelson-controlplane", by: machinesTest},
	{line: "token=$(kctl cluster token create --names w9 --ttl 1h)", by: page + ", " + machinesTest},
	{line: "kctl cluster token list", by: page + ", " + machinesTest},
	{line: `kctl cluster token delete "$token"`, by: page + ", " + machinesTest},
	{line: "kctl cluster revoke node/w3", like: "kctl cluster revoke node/NAME"},
	{line: "kctl cluster member remove cp3", like: "kctl cluster member remove cp2"},
	{line: "kctl cluster certs", by: page + ", " + machinesTest},
	{line: `cp "$KUBECONFIG" renewed && KUBECONFIG=renewed kctl cluster renew`, by: page + ", " + machinesTest},
	{line: "KUBECONFIG=renewed kctl get namespace kube-system", by: page + ", " + machinesTest},
	{line: "kctl cluster backup today", by: page + ", " + machinesTest},
	{line: "kctl cluster backup inspect today", by: "TestRestoreDrill, " + machinesTest},
	{line: "kctl cluster restore-test today", by: "TestRestoreDrill, " + machinesTest},
	{line: "kctl cluster compact", by: page + ", " + machinesTest},
	{line: "kctl top", by: "TestAutoscalingByCPU, " + machinesTest},
	{line: "kctl create deployment looked-at --image=keelson.dev/hello:v1", by: page + ", " + machinesTest},
	{line: "kctl rollout status deployment/looked-at --timeout=60s", by: page + ", " + machinesTest},
	{line: "kctl trace deployment/looked-at", by: page + ", " + machinesTest},
	{line: "kctl why deployment/looked-at", by: page + ", " + machinesTest},
	{line: "pod=$(kctl get pods -l app=looked-at -o name)", by: page, notOnMachines: reasonInAPod},
	{line: "kctl debug $pod -c debugger --image=keelson.dev/tools:v1 --target=hello --profile=general " +
		"--attach=false -- ps", by: page, notOnMachines: reasonInAPod},
	{line: "kctl wait $pod " +
		"--for='jsonpath={.status.ephemeralContainerStatuses[0].state.terminated.reason}=Completed' --timeout=60s",
		by: page, notOnMachines: reasonInAPod},
	{line: "kctl logs $pod -c debugger", by: page, notOnMachines: reasonInAPod},
	{line: "kctl debug node/NAME", by: "TestDebugANode", notOnMachines: reasonInAPod},
	{line: "kctl delete deployment looked-at --wait=false", by: page + ", " + machinesTest},
	{line: "kctl net trace POD SERVICE", by: "TestTrace, " + machinesTest},
	{line: "kctl net policies", by: "TestNetPolicies, " + machinesTest},
	{line: "kctl net services", by: "TestNetServices, " + machinesTest},
	{line: "kctl cluster support-bundle bundle.tar.gz", by: page + ", " + machinesTest},
	{line: "tar -tzf bundle.tar.gz", by: page + ", " + machinesTest},

	// upgrade
	{line: "kctl cluster upgrade -f cluster.yaml --to keelson-v1.1.0-linux-amd64.tar.gz --dry-run",
		by: "TestClusterUpgrade, " + machinesTest},
	{line: "kctl cluster upgrade -f cluster.yaml --to keelson-v1.1.0-linux-amd64.tar.gz",
		by: "TestClusterUpgrade, TestMachines, " + machinesTest},
	{line: "kctl cluster upgrade -f cluster.yaml --to ./dist --drain w1,w2 --skip cp3",
		by: "TestClusterUpgrade, " + machinesTest},
	{line: "kctl lab upgrade --to DIR --dry-run", reason: reasonLab + "; TestUpgradeAndBack runs it with --drain"},
	{line: "kctl lab upgrade --to DIR", by: "TestUpgradeAndBack", notOnMachines: reasonLab},
	{line: "kctl lab upgrade --to DIR --drain w1,w2", by: "TestUpgradeAndBack", notOnMachines: reasonLab},
	{line: "kctl lab replace HOST --bin DIR", by: "TestUpgradeAndBack", notOnMachines: reasonLab},
	{line: "kctl get nodes -o wide", by: machinesTest},
	{line: "sudo ./install.sh server --server 192.0.2.12", by: "TestAReplicaJoins, " + machinesTest},
	{line: "sudo ./install.sh agent --server 192.0.2.11", by: "TestAnAgentIsInstalledAndTakenAway, " + machinesTest},
	{line: "sudo dpkg -i keelson-v1.1.0-linux-amd64.deb", by: machinesTest},
	{line: "keelson-controlplane --version", by: machinesTest},

	// recover
	{line: "kctl cluster VERB", reason: pattern},
	{line: "keelson-controlplane VERB", reason: pattern},
	{line: "kctl cluster backup verify FILE", by: "TestBackupAndRestore",
		notOnMachines: "it reads a file, whatever the machine"},
	{line: "kctl cluster restore-test", by: "TestRestoreDrill, " + machinesTest},
	{line: "kctl cluster restore-test --fresh", by: "TestRestoreDrill, " + machinesTest},
	{line: "keelson-controlplane inspect", by: "TestReplicaRebuilt, TestOfflineVerbs, " + machinesTest},
	{line: "keelson-controlplane rebuild", by: "TestReplicaRebuilt, TestOfflineVerbs, " + machinesTest},
	{line: "kctl cluster member remove cp2", by: "TestReplicaRebuilt, " + machinesTest},
	{line: "keelson-controlplane join --advertise-address OWN-ADDRESS --token TOKEN --server ADDRESS-OF-ANOTHER",
		by: "TestMajorityLost, " + machinesTest},
	{line: "keelson-controlplane join --standby --advertise-address OWN-ADDRESS --token TOKEN --server " +
		"ADDRESS-OF-ANOTHER", by: "TestADeadReplicaIsReplaced, " + machinesTest},
	{line: "sudo ./install.sh server --standby --server ADDRESS-OF-ANOTHER --token TOKEN",
		by: "TestAReplicaJoins, " + machinesTest},
	{line: "kctl cluster token create --role controlplane", by: "TestMajorityLost, " + machinesTest},
	{line: "kctl lab up --standbys 1 --control-plane-flag=--replace-dead-after=30s",
		by: "TestADeadReplicaIsReplaced", notOnMachines: reasonLab},
	{line: "keelson-controlplane recover", by: "TestMajorityLost, TestOfflineVerbs, " + machinesTest},
	{line: "systemctl start keelson-controlplane", by: "TestAServerIsInstalled, " + machinesTest},
	{line: "keelson-controlplane rebuild --server ADDRESS-OF-THAT-ONE",
		by: "TestMajorityLost, TestReplicaRebuilt, " + machinesTest},
	{line: "keelson-controlplane rebuild --server ADDRESS-OF-THE-FIRST", by: "TestBackupAndRestore, " + machinesTest},
	{line: "kctl cluster backup serve /backups/today", by: "TestRestoreDrill, " + machinesTest},
	{line: "KUBECONFIG=... kubectl get configmap NAME -o yaml", by: "TestRestoreDrill, " + machinesTest},
	{line: "keelson-controlplane backup list", by: "TestBucket, " + machinesTest},
	{line: "keelson-controlplane backup fetch /root/newest", by: "TestBucket, " + machinesTest},
	{line: "keelson-controlplane backup inspect /root/newest", by: "TestRestoreDrill, " + machinesTest},
	{line: "keelson-controlplane restore /root/newest --replace",
		by: "TestBackupAndRestore, TestOfflineVerbs, " + machinesTest},
	{line: "keelson-controlplane init --advertise-address OWN-ADDRESS --cluster-name NAME",
		by: "TestBackupAndRestore, " + machinesTest},
	{line: "keelson-controlplane restore /root/newest --any-cluster --backup-keys OLD-STORE.KEYS",
		by: "TestBackupAndRestore, " + machinesTest},
	{line: "kctl cluster token create --names w1,w2 --replace", by: "TestRevokedNode, " + machinesTest},
	{line: "sudo sh -c 'umask 077 && echo TOKEN >/var/lib/keelson/join-token' && sudo systemctl restart keelson-agent",
		by: "TestRevokedNode, " + machinesTest},

	// secure
	{line: "kctl cluster rotate service-account-key", by: "TestKeysRotate, " + machinesTest},
	{line: "kctl cluster rotate cluster-ca", by: "TestTheCAIsExchangedUnderLoad, " + machinesTest},
	{line: "kctl cluster rotate peers-ca", by: "TestKeysRotate, " + machinesTest},
	{line: "kctl cluster rotate encryption-key", by: "TestKeysRotate, " + machinesTest},
	{line: "kctl cluster rotate --status", by: "TestTheCAIsExchangedUnderLoad, " + machinesTest},
	{line: "kctl cluster rotate --abort", by: "TestClusterCARotates, " + machinesTest},
	{line: "kctl cluster renew", by: "TestRenewKubeconfig, " + machinesTest},
	{line: "kctl rollout restart deployment/NAME", by: "TestWorkerPartitioned, " + machinesTest},
	{line: "kctl delete node NAME", like: "kctl delete node w3"},
	{line: "kctl cluster token create --names NAME --replace", by: "TestRevokedNode, " + machinesTest},
	{line: "keelson-controlplane peer-ca list", by: "TestPeerCA, " + machinesTest},
	{line: "keelson-controlplane peer-ca create FILE", by: "TestPeerCA, " + machinesTest},
	{line: "keelson-controlplane peer-ca trust FILE", by: "TestPeerCA, " + machinesTest},
	{line: "keelson-controlplane peer-ca use FILE", by: "TestPeerCA, " + machinesTest},
	{line: "keelson-controlplane peer-ca prune", by: "TestPeerCA, " + machinesTest},
	{line: "kctl cluster member remove NAME", like: "kctl cluster member remove cp2"},
	{line: "kctl cluster rotate cluster-ca --grace-period 0s", by: "TestTheCAIsExchangedUnderLoad, " + machinesTest},
	{line: "kctl cluster rotate --clear-removed NAME", by: "TestStandbyReplacesDeadReplica, " + machinesTest},
	{line: "kctl cluster token create --names w1,w2,... --replace",
		like: "kctl cluster token create --names w1,w2 --replace"},
	{line: "kctl cluster revoke node/NAME", by: "TestRevokedNode, " + machinesTest},
}
